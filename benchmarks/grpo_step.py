"""A GRPO step (sample, score, train) against TRL's GRPOTrainer with PEFT: tokens per CPU second, and peak memory.

    python benchmarks/grpo_step.py

Model: random Llama, hidden 256, 16 layers, vocabulary 16,384 (the head is a quarter of the work), LoRA r=16 on all
linear layers, float32, AdamW, temperature 1, one thread. A step has 4 prompts with 8 completions each, prompts of 128
tokens and completions of exactly 64; the reward is the number of even token ids. One update for each batch of
completions, without a reference model. Ours samples with `TorchSampler` from the trainer's own weights, shares a
prompt among its group in sampling and in training, and recomputes nothing that fits. TRL runs as a user gets it, and
with `gradient_checkpointing=False`.

First the two sides' gradient norms of a step on the same completions must agree to 1e-3. Goal: 1.3 x the tokens
(prompts and completions, each row counted whole) per second of TRL without recomputation, with a peak no higher.

Needs trl (`make bench` installs requirements-bench.txt).
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _pairs import describe_machine, peak_kib, ratio
from sft_vs_trl import copy_weights, lora, make_model, quiet
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_tokenizer
from twinkle_transformers.model import TransformersModel

PROMPTS, GROUP, PROMPT, COMPLETION, RATE, GOAL = 4, 8, 128, 64, 1e-4, 1.3
TOKENS = PROMPTS * GROUP * (PROMPT + COMPLETION)
TRL: dict[str, dict[str, Any]] = {"TRL": {}, "TRL, no recomputation": {"gradient_checkpointing": False}}


@dataclass
class Run:
    """CPU seconds of every step of two sides that took turns, and what TRL's first step was made of."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    norm: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when norms differ or the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--alone", choices=("ours", *TRL), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    if find_spec("trl") is None:
        print("trl is not installed: nothing is compared (pip install -r requirements-bench.txt -c constraints.txt)")
        return 0
    torch.set_num_threads(1)
    quiet()
    if options.alone:
        alone(options.alone, options.folder)
        return 0
    print(describe_machine(["torch", "transformers", "peft", "trl"]))
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), "llama")
        print(f"\n{options.steps} steps of {PROMPTS} x {GROUP} completions, {TOKENS} tokens a step")
        print("| | tokens/s | s a step | ours x faster | by step: median | peak MiB |")
        print("| --- | --- | --- | --- | --- | --- |")
        peaks = {side: measured(side, folder) / 1024 for side in ("ours", *TRL)}
        good = all(report(side, take_turns(folder, options.steps, changes), peaks) for side, changes in TRL.items())
    return 0 if good else 1


def report(name: str, run: Run, peaks: dict[str, float]) -> bool:
    """Print one comparison; say whether norms agree, and with the goal's side whether it is reached."""
    mine, other = sum(run.ours) / len(run.ours), sum(run.theirs) / len(run.theirs)
    wanted = f" (goal >= {GOAL})" if TRL[name] else ""
    print(f"| ours | {TOKENS / mine:.0f} | {mine:.2f} | | | {peaks['ours']:,.0f} |")
    print(
        f"| {name} | {TOKENS / other:.0f} | {other:.2f} | {other / mine:.2f}{wanted} | {ratio(run.theirs, run.ours)} "
        f"| {peaks[name]:,.0f} |"
    )
    return not TRL[name] or (other / mine >= GOAL and peaks["ours"] <= peaks[name])


class Ours:
    """Our side: a model with an adapter, and a sampler that shares its weights."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(5)
        self.model = TransformersModel(model_id=str(folder), mixed_precision="no", share_prefixes=True)
        self.model.add_adapter_to_model("default", lora())
        self.model.set_processor("InputProcessor", padding_free=True)
        self.model.set_loss("GRPOLoss")
        self.model.set_optimizer("AdamW", lr=RATE, weight_decay=0.0)
        self.sampler = TorchSampler(model=self.model)
        self.advantage = GRPOAdvantage()
        self.steps = 0

    def step(self) -> None:
        """Sample, score and train once."""
        self.steps += 1
        params = SamplingParams(max_tokens=COMPLETION, stop=[], num_samples=GROUP, logprobs=1, seed=self.steps)
        prompts = [{"input_ids": tokens(text)} for text in texts(self.steps)]
        answers = self.sampler.sample(prompts, params)
        sequences = [sequence for answer in answers for sequence in answer.sequences]
        old = [[pairs[0][1] for pairs in sequence.logprobs or []] for sequence in sequences]
        self.train(texts(self.steps), [sequence.tokens for sequence in sequences], old)

    def train(self, prompts: list[str], completions: list[list[int]], old: list[list[float]] | None) -> float:
        """Make one update, and return the gradient's norm before clipping."""
        advantages = self.advantage(rewards(completions), num_generations=GROUP).tolist()
        rows = [row(tokens(prompts[at // GROUP]), completion) for at, completion in enumerate(completions)]
        self.model.forward_backward(inputs=rows, old_logps=old, advantages=advantages)
        self.model.clip_grad_and_step(max_grad_norm=1e9)
        return float(self.model.calculate_metric(is_training=True)["grad_norm"])


def take_turns(folder: Path, steps: int, changes: dict[str, Any]) -> Run:
    """Compare the first step's norms, then let both sides make steps in turn; the first is dropped from the times.

    Raises:
        SystemExit: the norms differ, so that no time counts.
    """
    run, mine = Run(), Ours(folder)
    start = {name: p.detach().clone() for name, p in mine.model.model.named_parameters() if p.requires_grad}

    def turn(seconds: float) -> None:
        run.theirs.append(seconds)
        began = time.process_time()
        mine.step()
        run.ours.append(time.process_time() - began)

    theirs(folder, steps + 1, changes, start, turn, run)
    del run.ours[0], run.theirs[0]
    norm = Ours(folder).train(texts(1), run.completions, None)
    if abs(norm - run.norm) > 1e-3 * run.norm:
        raise SystemExit(f"gradient norms differ: ours {norm:.6f}, TRL {run.norm:.6f}; no time counts")
    return run


def theirs(
    folder: Path,
    steps: int,
    changes: dict[str, Any],
    start: dict[str, torch.Tensor] | None,
    turn: Callable[[float], None],
    run: Run,
) -> None:
    """Train with TRL from the adapter `start`; call `turn` with the CPU seconds of each step after it.

    With `start` None it begins from an adapter of its own.
    """
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        run.completions = run.completions or completion_ids
        return rewards(completion_ids)

    class Clock(TrainerCallback):
        """Takes the time from the end of a turn to the end of the next step."""

        began = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turn(time.process_time() - self.began)
            self.began = time.process_time()

        def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            run.norm = run.norm or float((logs or {}).get("grad_norm", 0.0))

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_steps=steps,
            max_completion_length=COMPLETION, generation_kwargs={"min_new_tokens": COMPLETION}, learning_rate=RATE,
            lr_scheduler_type="constant", loss_type="grpo", shuffle_dataset=False, max_grad_norm=1e9, bf16=False,
            use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
            logging_steps=1, **changes,
        )  # fmt: skip
        prompts = [{"prompt": text} for step in range(1, steps + 1) for text in texts(step)]
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), reward, config,
            train_dataset=datasets.Dataset.from_list(prompts), processing_class=tiny_tokenizer(None),
            peft_config=lora(), callbacks=[Clock()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if start is not None:
            copy_weights(trainer.model, start)
        trainer.train()


def texts(step: int) -> list[str]:
    """Return the prompts of a step; a letter is a token."""
    draw = random.Random(step)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT)) for _ in range(PROMPTS)]


@cache
def tokens(text: str) -> list[int]:
    """Return a text's token ids."""
    found: list[int] = tiny_tokenizer(None)(text, add_special_tokens=False)["input_ids"]
    return found


def rewards(completions: list[list[int]]) -> list[float]:
    """Return the number of even ids of each completion: large beside what each side adds to standard deviations."""
    return [float(sum(token % 2 == 0 for token in completion)) for completion in completions]


def row(prompt: list[int], completion: list[int]) -> dict[str, list[int]]:
    """Return a row that trains the completion."""
    labels = [*[-100] * (len(prompt) - 1), *completion, -100]
    return {"input_ids": [*prompt, *completion], "labels": labels}


def alone(name: str, folder: Path) -> None:
    """Let one side make three steps alone, and print the peak resident KiB."""
    if name == "ours":
        side = Ours(folder)
        for _ in range(3):
            side.step()
    else:
        theirs(folder, 3, TRL[name], None, lambda seconds: None, Run())
    print(peak_kib())


def measured(name: str, folder: Path) -> int:
    """Return the peak of a process of its own."""
    command = [sys.executable, __file__, "--alone", name, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())

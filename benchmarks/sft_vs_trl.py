"""Our loop against TRL's SFTTrainer with PEFT: trained tokens per CPU second, and peak memory.

    python benchmarks/sft_vs_trl.py

Model: random Llama (or `--architecture qwen3`), hidden 256, 16 layers, vocabulary 16,384 (the head is a quarter of the
work), LoRA r=16 on all linear layers, float32, AdamW, batches of 8: forward, backward, clipping and update, with the
data loader and the logging of both sides. Ours leaves the padding out and recomputes nothing that fits. TRL runs as a
user gets it (padded, gradient checkpointing), with `gradient_checkpointing=False`, and on mixed lengths with
`padding_free=True` besides (meant for flash attention, of which it warns; on a CPU transformers makes a dense mask).
Both sides log the loss and the accuracy of tokens; TRL computes their entropy as well.

Two data sets: mixed lengths (log-normal, 2.7 x as many positions with padding as without) and rows of 128 tokens. The
same weights, adapter, rows and optimizer; the losses of all steps must agree to 1e-4 before any time counts. Goals,
against TRL as a user gets it: 4.5 x the tokens per second on mixed lengths, 1.6 x on equal ones.

Needs trl (`make bench` installs requirements-bench.txt).
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import torch
from _pairs import describe_machine, peak_kib, ratio
from transformers import AutoModelForCausalLM, LlamaConfig, PrinterCallback, Qwen3Config, TrainerCallback
from transformers.utils import logging as hf_logging

from twinkle.dataloader import DataLoader
from twinkle.testing import tiny_tokenizer
from twinkle_transformers.model import TransformersModel

ROWS, VOCABULARY, RATE, LOG_EVERY = 8, 16384, 1e-4, 10
GOALS = {"mixed": 4.5, "equal": 1.6}
TRL: dict[str, dict[str, Any]] = {
    "TRL": {},
    "TRL, no recomputation": {"gradient_checkpointing": False},
    "TRL, no recomputation, padding_free": {"gradient_checkpointing": False, "padding_free": True, "max_length": None},
}
Row = dict[str, list[int]]


@dataclass
class Run:
    """CPU seconds and losses of every step of two sides that took turns; the first step is dropped from the times."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    our_losses: list[float] = field(default_factory=list)
    their_losses: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when losses differ or a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--alone", choices=("ours", *TRL), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--architecture", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--batches", type=int, default=5)
    options = parser.parse_args(arguments)
    if find_spec("trl") is None:
        print("trl is not installed: nothing is compared (pip install -r requirements-bench.txt -c constraints.txt)")
        return 0
    torch.set_num_threads(1)
    quiet()
    if options.alone:
        alone(options.alone, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return compare(make_model(Path(folder), options.architecture), options.batches)


def compare(folder: Path, batches: int) -> int:
    """Compare losses, then time, then memory."""
    print(describe_machine(["torch", "transformers", "peft", "trl"]))
    good = True
    for kind in GOALS:
        rows = data(kind, batches)
        tokens, padded = sum(map(count, rows[ROWS:])), sum(ROWS * max(map(count, b)) for b in cut(rows[ROWS:]))
        print(f"\n{kind} lengths: {batches} batches of {ROWS}, {tokens} tokens, {padded / tokens:.2f} x with padding")
        print("| | tokens/s | s | ours x faster | by batch: median | losses differ by |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, changes in TRL.items():
            if kind == "equal" and "padding_free" in changes:
                continue  # there is no padding to leave out, and one long row under a mask is slower
            run = take_turns(folder, rows, changes)
            good &= report(name, run, tokens, GOALS[kind] if not changes else None)
    peaks = {name: measured(name, folder) / 1024 for name in ("ours", *TRL)}
    print("\npeak MiB of a process, mixed lengths: " + ", ".join(f"{name} {mib:,.0f}" for name, mib in peaks.items()))
    return 0 if good else 1


def report(name: str, run: Run, tokens: int, goal: float | None) -> bool:
    """Print one line of the table; say whether losses agree and the goal is reached."""
    apart = max(abs(a - b) for a, b in zip(run.our_losses, run.their_losses, strict=True))
    if apart > 1e-4:
        print(f"{name}: losses differ by {apart:.1e}: no time is counted")
        return False
    mine, other = sum(run.ours), sum(run.theirs)
    print(f"| ours | {tokens / mine:.0f} | {mine:.2f} | | | |")
    wanted = "" if goal is None else f" (goal >= {goal})"
    print(
        f"| {name} | {tokens / other:.0f} | {other:.2f} | {other / mine:.2f}{wanted} | {ratio(run.theirs, run.ours)} | "
        f"{apart:.0e} |"
    )
    return goal is None or other / mine >= goal


def take_turns(folder: Path, rows: list[Row], changes: dict[str, Any]) -> Run:
    """Train both sides on the same rows, one step each in turn."""
    run, (model, step) = Run(), ours(folder, rows)
    start = {name: p.detach().clone() for name, p in model.model.named_parameters() if p.requires_grad}

    def turn(seconds: float, loss: float) -> None:
        run.theirs.append(seconds)
        run.their_losses.append(loss)
        began = time.process_time()
        mine = step()
        run.ours.append(time.process_time() - began)
        run.our_losses.append(mine)

    theirs(folder, rows, changes, start, turn)
    del run.ours[0], run.theirs[0]
    return run


def ours(folder: Path, rows: list[Row]) -> tuple[TransformersModel, Callable[[], float]]:
    """Return our model, and a function that makes the next step and returns its loss."""
    torch.manual_seed(5)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model("default", lora())
    model.set_processor("InputProcessor", padding_free=True)
    model.set_optimizer("AdamW", lr=RATE, weight_decay=0.0)
    shifted = [{"input_ids": row["input_ids"], "labels": [*row["input_ids"][1:], -100]} for row in rows]

    def steps() -> Iterator[float]:
        for number, batch in enumerate(DataLoader(shifted, batch_size=ROWS), 1):
            loss = model.forward_backward(inputs=batch)["loss"]
            model.clip_grad_and_step(max_grad_norm=1.0)
            if number % LOG_EVERY == 0:
                model.calculate_metric(is_training=True)
            yield loss

    loop = steps()
    return model, lambda: next(loop)


def theirs(
    folder: Path,
    rows: list[Row],
    changes: dict[str, Any],
    start: dict[str, torch.Tensor] | None,
    turn: Callable[[float, float], None],
) -> None:
    """Train with TRL from the adapter `start`; call `turn` with CPU seconds and loss of each step after it.

    With `start` None it begins from an adapter of its own.
    """
    import datasets
    from trl import SFTConfig, SFTTrainer

    class Trainer(SFTTrainer):
        """Keeps the loss of each step."""

        loss = 0.0

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            made = super().training_step(*args, **kwargs)
            self.loss = float(made)
            return made

    class Clock(TrainerCallback):
        """Takes the time from the end of a turn to the end of the next step: data, step and logging."""

        began = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turn(time.process_time() - self.began, trainer.loss)
            self.began = time.process_time()

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as output:
        config = SFTConfig(
            output_dir=output, per_device_train_batch_size=ROWS, num_train_epochs=1, learning_rate=RATE,
            lr_scheduler_type="constant", bf16=False, use_cpu=True, train_sampling_strategy="sequential",
            report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
            logging_steps=LOG_EVERY, **changes,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = Trainer(
            model, config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tiny_tokenizer(),
            peft_config=lora(), callbacks=[Clock()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if start is not None:
            copy_weights(trainer.model, start)
        trainer.train()


def copy_weights(model: Any, start: dict[str, torch.Tensor]) -> None:
    """Give the trained parameters of `model` these numbers."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if trained.keys() != start.keys():
        raise RuntimeError(f"the two sides train different parameters: {sorted(trained.keys() ^ start.keys())[:4]}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(start[name])


def data(kind: str, batches: int) -> list[Row]:
    """Return the rows; the first batch, which is dropped from the times, comes twice."""
    generator = torch.Generator().manual_seed(12)  # of the first seeds one with 2.7 x
    drawn = (4.3 + 0.9 * torch.randn(ROWS * batches, generator=generator)).exp().clamp(8, 512).int().tolist()
    lengths = drawn if kind == "mixed" else [128] * (ROWS * batches)
    rows = [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]
    return rows[:ROWS] + rows


def cut(rows: list[Row]) -> list[list[Row]]:
    """Return the batches."""
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def count(row: Row) -> int:
    """Return the number of tokens."""
    return len(row["input_ids"])


def lora() -> peft.LoraConfig:
    """Return the adapter's configuration."""
    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def make_model(folder: Path, architecture: str) -> Path:
    """Write the model of this benchmark."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "head_dim": 32,
    }  # fmt: skip
    config = LlamaConfig(**sizes) if architecture == "llama" else Qwen3Config(**sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def alone(name: str, folder: Path) -> None:
    """Train one side alone on three mixed batches, and print the peak resident KiB."""
    rows = data("mixed", 5)[: 3 * ROWS]
    if name == "ours":
        _, step = ours(folder, rows)
        for _ in cut(rows):
            step()
    else:
        theirs(folder, rows, TRL[name], None, lambda seconds, loss: None)
    print(peak_kib())


def measured(name: str, folder: Path) -> int:
    """Return the peak of a process of its own."""
    command = [sys.executable, __file__, "--alone", name, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def quiet() -> None:
    """Keep what libraries say out of the table."""
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    sys.exit(main())

"""Side by side with twinkle-kit 0.5.1, the published package of the same interface: CPU time a step and peak memory.

    python benchmarks/vs_twinkle_kit.py --python /path/to/kit/bin/python

It pins other versions, so it needs an environment of its own; without `--python` this says how to make it. Both sides
run the same script (`_kit_worker.py`) on the same weights, adapter and rows, in processes that take turns, one thread
each: LoRA r=8 on all linear layers, AdamW, 8 rows of 20 to 128 tokens. Two random Qwen3: hidden 64, 2 layers,
vocabulary 49,152 (nearly all of the work is the head), and hidden 256, 16 layers, vocabulary 16,384 (a quarter is). Two
precisions: float32 ("no"), and bfloat16 autocast ("bf16"), the default of both. twinkle-kit always recomputes
activations; ours does where they would not fit. Ours runs as it comes (padded), and with `padding_free=True`.

Losses of all steps must agree to 1e-4 ("no") or 2e-2 ("bf16") before any time counts. twinkle-kit knows no CPU: the
worker tells it that its GPU is one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

import peft
import torch
from _pairs import describe_machine, ratio
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from twinkle.testing import tiny_tokenizer

LENGTHS = (128, 96, 77, 60, 48, 33, 25, 20)
SHAPES = {"hidden 64, 2 layers, V 49,152": (64, 2, 49152), "hidden 256, 16 layers, V 16,384": (256, 16, 16384)}
TOLERANCE = {"no": 1e-4, "bf16": 2e-2}
HOW = """twinkle-kit is compared only if its environment is named. To make one (2 minutes, 1.7 GB):
    python3.11 -m venv kit
    kit/bin/pip install torch==2.13.0 twinkle-kit==0.5.1
    python benchmarks/vs_twinkle_kit.py --python kit/bin/python"""
Answer = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; exit code 1 when losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, help="interpreter of an environment with twinkle-kit")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args(arguments)
    if options.python is None:
        print(HOW)
        return 0
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    print(f"{len(LENGTHS)} rows, {sum(LENGTHS)} tokens, {len(LENGTHS) * max(LENGTHS)} with padding")
    good = True
    for title, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), *shape)
            for precision in TOLERANCE:
                good &= compare(title, Path(folder), precision, options)
    return 0 if good else 1


def compare(title: str, folder: Path, precision: str, options: argparse.Namespace) -> bool:
    """Compare losses, then time and memory, of one shape in one precision."""
    job = {"model": str(folder), "adapter": str(folder / "start.safetensors"), "precision": precision}
    with ExitStack() as stack:
        sides = {
            "kit": stack.enter_context(side(options.python, {**job, "kit": True, "processor": {}})),
            "ours": stack.enter_context(side(sys.executable, {**job, "kit": False, "processor": {}})),
            "ours, padding_free": stack.enter_context(
                side(sys.executable, {**job, "kit": False, "processor": {"padding_free": True}})
            ),
        }
        made = take_turns(sides, folder, options.repetitions)
        versions = sides["kit"].versions
    print(f"\n{title}, mixed_precision={precision!r}; kit: {versions}")
    wanted = [answer["loss"] for answer in made["kit"]]
    apart = max(abs(a["loss"] - b) for answers in made.values() for a, b in zip(answers, wanted, strict=True))
    if apart > TOLERANCE[precision]:
        print(f"losses differ by {apart:.1e}: no time is counted")
        return False
    print("| | CPU s a step | kit / this | peak MiB |\n| --- | --- | --- | --- |")
    seconds = {name: [answer["seconds"] for answer in answers[1:]] for name, answers in made.items()}
    for name, values in seconds.items():
        peak = made[name][-1]["peak"] / 1024
        print(f"| {name} | {median(values):.3f} | {ratio(seconds['kit'], values)} | {peak:,.0f} |")
    print(f"losses differ by {apart:.1e}")
    return True


def take_turns(sides: dict[str, "Side"], folder: Path, repetitions: int) -> dict[str, list[Answer]]:
    """Let every side make a step on the same batch, in changing order; the first round is for warming up."""
    made: dict[str, list[Answer]] = {name: [] for name in sides}
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    for number in range(repetitions + 1):
        batch = rows(number, vocabulary)
        for name in sorted(sides, reverse=bool(number % 2)):
            made[name].append(sides[name].step(batch))
    return made


class Side:
    """A process that makes steps on request.

    Args:
        process: it reads a batch a line and answers by a line.
        said: what it wrote to its standard error.

    Attributes:
        versions: of its packages, in words.
    """

    def __init__(self, process: "subprocess.Popen[str]", said: IO[str]) -> None:
        self._process, self._said = process, said
        self.versions = ""

    def ask(self, question: Any) -> dict[str, Any]:
        """Send a line and return the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError(f"{self._process.args!r} has ended:\n{self._said.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self, batch: list[dict[str, list[int]]]) -> Answer:
        """Return CPU seconds, loss and peak resident KiB of one step."""
        return self.ask(batch)


@contextmanager
def side(python: str | Path, job: dict[str, Any], script: str = "_kit_worker.py") -> Iterator[Side]:
    """Start one side, and end it afterwards."""
    command = [str(python), str(Path(__file__).with_name(script))]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        try:
            made = Side(process, said)
            made.versions = made.ask(job)["versions"]
            yield made
        finally:
            process.kill()


def rows(number: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Return one batch; every next token is trained."""
    generator = torch.Generator().manual_seed(number)
    drawn = (torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS)
    return [{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in drawn]


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """Write a random model, a tokenizer, and an adapter to start from."""
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = {n: p.detach() for n, p in peft.get_peft_model(model, lora).named_parameters() if p.requires_grad}
    save_file(trained, folder / "start.safetensors")


if __name__ == "__main__":
    sys.exit(main())

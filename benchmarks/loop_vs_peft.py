"""Our loop against a hand-written PEFT + torch loop: CPU time per step and peak memory.

    python benchmarks/loop_vs_peft.py

Model: random Llama, hidden 256, 16 layers, vocabulary 16,384 (the head is a quarter of the work), LoRA r=16 on all
linear layers, AdamW, clipping at 1, float32, batches of 8 rows of 20 to 128 tokens padded to the longest. Goals: at
most 1.03 x the CPU time and 1.00 x the memory.
"""

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from _pairs import describe_machine, paired, peak_kib
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from twinkle.testing import tiny_tokenizer
from twinkle_transformers.model import TransformersModel

LENGTHS = (128, 96, 77, 60, 48, 33, 25, 20)
STEPS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alone", choices=("ours", "peft"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    if options.alone:
        step, _ = (ours if options.alone == "ours" else theirs)(options.folder)
        for _ in range(3):
            step()
        print(peak_kib())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return compare(make_model(Path(folder)), options.repetitions)


def compare(folder: Path, repetitions: int) -> int:
    """Compare gradients, then time, then memory."""
    our_step, our_grads = ours(folder)
    their_step, their_grads = theirs(folder)
    mine, wanted = our_grads(), their_grads()
    error = sum(float((mine[n] - wanted[n]).square().sum()) for n in wanted) ** 0.5
    size = sum(float(wanted[n].square().sum()) for n in wanted) ** 0.5
    print(describe_machine(["torch", "transformers", "peft"]))
    tokens, padded = sum(LENGTHS), len(LENGTHS) * max(LENGTHS)
    print(f"8 rows, {tokens} tokens, {padded} padded; gradients differ by {error / size:.1e} (norm-relative)")
    if error / size > 2e-6:
        print("gradients differ: no time is counted")
        return 1
    a, b, time_ratio = paired(our_step, their_step, repetitions)
    memory = {name: alone(name, folder) for name in ("ours", "peft")}
    memory_ratio = memory["ours"] / memory["peft"]
    print(f"{'':12}{'ours':>12}{'PEFT + torch':>14}{'ratio':>8}")
    print(f"{'CPU s / step':12}{a / STEPS:>12.3f}{b / STEPS:>14.3f}   {time_ratio}   goal <= 1.03")
    peaks = f"{memory['ours'] / 1024:>12.0f}{memory['peft'] / 1024:>14.0f}"
    print(f"{'peak MiB':12}{peaks}   {memory_ratio:.3f}   goal <= 1.00")
    return 0 if time_ratio.median <= 1.03 and memory_ratio <= 1.0 else 1


def make_model(folder: Path) -> Path:
    """Write the model of this benchmark."""
    config = LlamaConfig(
        vocab_size=16384, hidden_size=256, intermediate_size=704, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def rows() -> list[dict[str, Any]]:
    """Return the batch."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, 16384, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [*ids[1:], -100]})
    return made


def lora() -> peft.LoraConfig:
    """Return the adapter's configuration."""
    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


Contestant = tuple[Callable[[], None], Callable[[], dict[str, torch.Tensor]]]


def ours(folder: Path) -> Contestant:
    """Our loop: step function and gradients of one batch."""
    torch.manual_seed(5)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model("default", lora())
    model.set_optimizer("AdamW", lr=1e-4, weight_decay=0.0)
    batch = rows()

    def step() -> None:
        for _ in range(STEPS):
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step(1.0)

    def grads() -> dict[str, torch.Tensor]:
        model.forward_backward(inputs=batch)
        model.clip_grad_norm(0)
        found = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    return step, grads


def theirs(folder: Path) -> Contestant:
    """The loop that one writes by hand with transformers, PEFT and torch."""
    torch.manual_seed(5)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    width = max(LENGTHS)

    def collate() -> dict[str, torch.Tensor]:
        made = rows()
        ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in made])
        mask = torch.tensor([[1] * n + [0] * (width - n) for n in LENGTHS])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    batch = collate()

    def step() -> None:
        model.train()
        for _ in range(STEPS):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def grads() -> dict[str, torch.Tensor]:
        model.train()
        model(**batch).loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        return found

    return step, grads


def alone(name: str, folder: Path) -> int:
    """Return the peak resident KiB of a process that runs one contestant alone."""
    command = [sys.executable, __file__, "--alone", name, "--folder", str(folder)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())

"""Sequences without padding: ours against transformers' packed rows, against padding, and attention alone.

    python benchmarks/packing.py

16 sequences of 12 to 454 tokens: 1,482 tokens, 7,264 with padding (4.9 x). Model: random Llama, hidden 256, 16 layers,
vocabulary 16,384, LoRA r=16 on all linear layers, float32, forward and backward. Transformers packs by `position_ids`,
which gives its attention a dense `[T, T]` mask. Attention alone: 8 heads of 32, 4 of keys and values, the same
lengths. Goals: at least 1.35 x transformers' packed rows, 0.95 x the padding ratio against our own padded loop, and
attention 3.5 x the dense mask.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from _pairs import Ratio, describe_machine, paired
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from twinkle.testing import tiny_tokenizer
from twinkle_torch.segments import Segments, segment_attention
from twinkle_transformers.model import TransformersModel

LENGTHS = (454, 12, 96, 38, 210, 60, 20, 80, 150, 26, 52, 120, 16, 72, 32, 44)
PADDING = len(LENGTHS) * max(LENGTHS) / sum(LENGTHS)
GOALS = {"HF packed": 1.35, "ours padded": 0.95 * PADDING, "dense mask": 3.5}

Gradients = dict[str, Tensor]
Contestant = tuple[Callable[[], object], Callable[[], Gradients]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    print(f"{len(LENGTHS)} sequences, {sum(LENGTHS)} tokens, {PADDING:.2f} x that with padding")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        ours = twinkle(Path(folder), padding_free=True)
        rivals = {"HF packed": packed(Path(folder)), "ours padded": twinkle(Path(folder), padding_free=False)}
        good = [compare(name, ours, rival, options.repetitions) for name, rival in rivals.items()]
    good.append(compare("dense mask", segmented(), masked(), 4 * options.repetitions))
    return 0 if all(good) else 1


def compare(name: str, ours: Contestant, theirs: Contestant, repetitions: int) -> bool:
    """Compare gradients, then time; say whether the goal is reached."""
    mine, wanted = ours[1](), theirs[1]()
    error = sum(float((mine[n] - wanted[n]).square().sum()) for n in wanted) ** 0.5
    size = sum(float(wanted[n].square().sum()) for n in wanted) ** 0.5
    if mine.keys() != wanted.keys() or error / size > 2e-6:
        print(f"{name}: gradients differ by {error / size:.1e}: no time is counted")
        return False
    b, a, ratio = paired(theirs[0], ours[0], repetitions)
    print(
        f"{name:12} {b:7.3f} s, ours {a:7.3f} s, speed-up {ratio}   goal >= {GOALS[name]:.2f}   "
        f"gradients differ by {error / size:.1e}"
    )
    return reached(ratio, GOALS[name])


def reached(ratio: Ratio, goal: float) -> bool:
    """Say whether the median reaches the goal."""
    return ratio.median >= goal


def make_model(folder: Path) -> None:
    """Write the model of this benchmark."""
    config = LlamaConfig(
        vocab_size=16384, hidden_size=256, intermediate_size=704, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def rows() -> list[dict[str, Any]]:
    """Return the sequences; every next token is trained."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, 16384, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [*ids[1:], -100]})
    return made


def lora() -> peft.LoraConfig:
    """Return the adapter's configuration."""
    return peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def twinkle(folder: Path, padding_free: bool) -> Contestant:
    """Our loop, with or without padding."""
    torch.manual_seed(5)
    model = TransformersModel(model_id=str(folder), mixed_precision="no", gradient_checkpointing=False)
    model.add_adapter_to_model("default", lora())
    model.set_processor("InputProcessor", padding_free=padding_free)
    batch = rows()

    def step() -> None:
        model.forward_backward(inputs=batch)
        model.zero_grad(flush=True)

    def gradients() -> Gradients:
        model.forward_backward(inputs=batch)
        model.clip_grad_norm(0)
        found = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    return step, gradients


def packed(folder: Path) -> Contestant:
    """What one writes by hand with transformers and PEFT: one row, told apart by `position_ids`."""
    torch.manual_seed(5)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora()).train()
    made = rows()
    targets = torch.tensor([label for row in made for label in row["labels"]])
    batch = {
        "input_ids": torch.tensor([[token for row in made for token in row["input_ids"]]]),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "use_cache": False,
    }

    def step() -> None:
        torch.nn.functional.cross_entropy(model(**batch).logits[0], targets).backward()
        model.zero_grad()

    def gradients() -> Gradients:
        torch.nn.functional.cross_entropy(model(**batch).logits[0], targets).backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    return step, gradients


def projections() -> Gradients:
    """Return queries, keys and values of one layer, `[T, heads, 32]`."""
    generator = torch.Generator().manual_seed(2)
    heads = {"q": 8, "k": 4, "v": 4}
    return {
        name: torch.randn(sum(LENGTHS), count, 32, generator=generator).requires_grad_()
        for name, count in heads.items()
    }


def attention(attend: Callable[..., Tensor]) -> Contestant:
    """Forward and backward of one layer's attention."""
    leaves = projections()

    def gradients() -> Gradients:
        out = attend(**leaves)
        return dict(zip(leaves, torch.autograd.grad(out.square().sum(), list(leaves.values())), strict=True))

    return gradients, gradients


def segmented() -> Contestant:
    """Our attention."""
    segments = Segments.of(LENGTHS)
    return attention(lambda **tensors: segment_attention(**tensors, segments=segments))


def masked() -> Contestant:
    """Attention under a dense mask, which is made beforehand."""
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask = ((owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril())[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stacked = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(*stacked, attn_mask=mask)
        return out[0].transpose(0, 1)

    return attention(attend)


if __name__ == "__main__":
    sys.exit(main())

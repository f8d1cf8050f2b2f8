"""Our pool of adapters side by side with that of twinkle-kit 0.5.1, the published package of the same interface.

    python benchmarks/vs_twinkle_kit_pool.py --python /path/to/kit/bin/python

twinkle-kit needs an environment of its own; without `--python` this says how to make it. Both sides run the same script
(`_kit_pool_worker.py`) with `MultiLoraTransformersModel` on the same weights, adapters and rows, in processes that take
turns, one thread each: random Qwen3 (hidden 128, 4 layers, vocabulary 49,152: the head is most of the work), LoRA r=16
on all linear layers, float32, AdamW, exactly as many adapters as are trained. A round is forward and backward of every
adapter (theirs in a call each, ours in one call), then clipping and update (likewise). twinkle-kit always recomputes
activations; ours does where they would not fit.

The losses of every adapter in every round must agree to 1e-4 before any time counts; since rounds follow one another,
updates are compared with them. Goals, theirs / ours: with 8 adapters and 16 tokens each 4 x, and 5 x for the update.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _pairs import Ratio, describe_machine, ratio
from fused_tenants import Shape, config, make_model
from peft import get_peft_model
from transformers.utils import logging
from vs_twinkle_kit import HOW, Side, side

SHAPE = Shape(128, 4, 49152, 1, 0)
RANK = 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Match:
    """Adapters, tokens of the one row that each has, and goals for training and update (theirs / ours)."""

    adapters: int
    tokens: int
    train: float | None = None
    update: float | None = None


MATCHES = (Match(8, 16, 4.0, 5.0), Match(16, 16), Match(8, 64))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when losses differ or a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, help="interpreter of an environment with twinkle-kit")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args(arguments)
    if options.python is None:
        print(HOW.replace("vs_twinkle_kit.py", "vs_twinkle_kit_pool.py"))
        return 0
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(folder), max(match.adapters for match in MATCHES))
        good = [compare(match, Path(folder), adapters, options) for match in MATCHES]
    return 0 if all(good) else 1


def compare(match: Match, folder: Path, adapters: dict[str, str], options: argparse.Namespace) -> bool:
    """Compare losses, then the times of training and update."""
    mine = dict(list(adapters.items())[: match.adapters])
    job = {"model": str(folder), "rank": RANK, "adapters": mine}
    script = "_kit_pool_worker.py"
    with ExitStack() as stack:
        kit = stack.enter_context(side(options.python, {**job, "kit": True}, script))
        ours = stack.enter_context(side(sys.executable, {**job, "kit": False}, script))
        rounds = take_turns(kit, ours, match, list(mine), options.repetitions)
        versions = kit.versions
    print(f"\n{match.adapters} adapters, {match.tokens} tokens each; kit: {versions}")
    apart = max(abs(a - b) for one, other in rounds for a, b in zip(one["losses"], other["losses"], strict=True))
    if apart > TOLERANCE:
        print(f"losses differ by {apart:.1e}: no time is counted")
        return False
    print("| | twinkle-kit, CPU ms | ours | kit / ours | goal |\n| --- | --- | --- | --- | --- |")
    good = [report(key, rounds, goal) for key, goal in (("train", match.train), ("update", match.update))]
    peaks = [answer["peak"] / 1024 for answer in rounds[-1]]
    print(f"losses differ by {apart:.1e}; peak MiB {peaks[0]:,.0f} and {peaks[1]:,.0f}")
    return all(good)


def report(key: str, rounds: list[tuple[dict[str, Any], dict[str, Any]]], goal: float | None) -> bool:
    """Print one line and say whether its goal is reached; the first round was for warming up."""
    theirs, ours = ([answers[which][key] for answers in rounds[1:]] for which in (0, 1))
    gain: Ratio = ratio(theirs, ours)
    wanted = "" if goal is None else f">= {goal}"
    print(f"| {key} | {1e3 * median(theirs):.1f} | {1e3 * median(ours):.1f} | {gain} | {wanted} |")
    return goal is None or gain.median >= goal


def take_turns(
    kit: Side, ours: Side, match: Match, names: list[str], repetitions: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Let both sides do rounds on the same rows, in changing order; return the answers of each round."""
    found = []
    for number in range(repetitions + 1):
        batch = rows(number, match, names)
        if number % 2:
            one = kit.ask(batch)
            other = ours.ask(batch)
        else:
            other = ours.ask(batch)
            one = kit.ask(batch)
        found.append((one, other))
    return found


def rows(number: int, match: Match, names: list[str]) -> dict[str, list[dict[str, list[int]]]]:
    """Return a row for each adapter; every next token is trained."""
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(3, SHAPE.vocabulary, (len(names), match.tokens), generator=draw).tolist()
    return {name: [{"input_ids": row, "labels": [*row[1:], -100]}] for name, row in zip(names, ids, strict=True)}


def make_adapters(folder: Path, count: int) -> dict[str, str]:
    """Write a random model, a tokenizer and adapters, B included; return the folders of the adapters by name."""
    model = get_peft_model(make_model(SHAPE, folder), config())
    found = {}
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
        found[f"t{index}"] = str(folder / f"t{index}")
        model.save_pretrained(found[f"t{index}"])
    return found


if __name__ == "__main__":
    sys.exit(main())

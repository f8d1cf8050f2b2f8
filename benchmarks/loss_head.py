"""The loss head against whole logits and against checkpointed chunks: CPU time and peak memory.

    python benchmarks/loss_head.py [--tokens 1024 --hidden 1024 --vocabulary 151936 --repetitions 5]

One frozen head (no bias) under 1,024 positions of hidden size 1,024 and 151,936 tokens, float32 and bfloat16, forward
and backward to the hidden states. Contestants:

- naive: logits, their log-softmax in float32, the targets' entries
- checkpoint: the same in chunks of 256 positions, recomputed in the backward
- ours: `twinkle_torch.head.score_tokens`
- ours, sparse: the same where 70 % of the positions have weight 0 and are left out

Goals: ours <= 1.05 x naive, checkpoint >= 1.5 x ours, naive >= 3 x ours sparse, extra memory of ours <= 2 x 256 x V x 4
bytes. Gradients are compared before any time is counted. Memory is that of a fresh process for each contestant: its
peak less what it held before the pass.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from _pairs import describe_machine, in_turn, peak_kib, ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinkle_torch.head import CHUNK_TOKENS, score_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KEPT = 0.3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
Shape = tuple[int, int, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; exit code 1 when gradients differ or a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--alone", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="only this one")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shape = (options.tokens, options.hidden, options.vocabulary)
    if options.alone:
        print(extra_kib(options.alone, shape, options.dtype))
        return 0
    print(describe_machine(["torch"]))
    chosen = [options.dtype] if options.dtype else list(DTYPES)
    return max(compare(shape, dtype, options.repetitions) for dtype in chosen)


def compare(shape: Shape, dtype: str, repetitions: int) -> int:
    """Compare gradients, then time, then memory."""
    tokens, hidden, vocabulary = shape
    states, targets, head, kept = problem(shape, dtype)
    wanted = naive(states, targets, head)
    ours, far = score(states, targets, head), checkpointed(states, targets, head)
    partly = score_kept(states, targets, head, kept)
    error = distance(ours, wanted)
    part_error = distance(partly, torch.zeros_like(wanted).index_copy(0, kept, wanted[kept]))
    print(f"\n{dtype}, {tokens} positions, hidden {hidden}, vocabulary {vocabulary}: gradients differ by {error:.1e}, "
          f"sparse {part_error:.1e}, checkpointed {distance(far, wanted):.1e}")  # fmt: skip
    if max(error, part_error) > TOLERANCE[dtype]:
        print("gradients differ: no time is counted")
        return 1
    runs = {name: partial(run, states, targets, head, kept) for name, run in CONTESTANTS.items()}
    seconds = in_turn(runs, repetitions, warm=True)  # each has just made its gradients
    memory = {name: measured(name, shape, dtype) for name in CONTESTANTS}
    print("| | CPU s | extra peak MiB |\n| --- | --- | --- |")
    for name, values in seconds.items():
        print(f"| {name} | {median(values):.2f} | {memory[name] / 1024:,.0f} |")
    bound = 2 * CHUNK_TOKENS * vocabulary * 4 / 1024
    goals = [
        ("ours / naive", ratio(seconds["ours"], seconds["naive"]), 1.05, "<="),
        ("checkpoint / ours", ratio(seconds["checkpoint"], seconds["ours"]), 1.5, ">="),
        ("naive / ours sparse", ratio(seconds["naive"], seconds["sparse"]), 3.0, ">="),
    ]
    missed = memory["ours"] > bound
    for name, found, goal, sign in goals:
        print(f"{name}: {found}, goal {sign} {goal}")
        missed |= found.median > goal if sign == "<=" else found.median < goal
    print(f"extra memory of ours: {memory['ours'] / bound:.2f} of 2 x chunk x V x 4 bytes, goal <= 1")
    return int(missed)


def problem(shape: Shape, dtype: str) -> tuple[Tensor, Tensor, nn.Linear, Tensor]:
    """Return hidden states, targets, a frozen head, and the positions that the sparse contestant trains."""
    tokens, hidden, vocabulary = shape
    torch.manual_seed(0)
    kind = DTYPES[dtype]
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=kind, device="meta").to_empty(device="cpu")
    head.weight.requires_grad_(False).normal_(std=0.02)
    states = torch.empty(tokens, hidden, dtype=kind).normal_().requires_grad_()
    kept = torch.randperm(tokens)[: round(KEPT * tokens)].sort().values
    return states, torch.randint(0, vocabulary, (tokens,)), head, kept


def naive(states: Tensor, targets: Tensor, head: nn.Linear) -> Tensor:
    """Return the gradient of the summed log-probabilities by the states, from whole logits."""
    logps = head(states).float().log_softmax(-1).gather(-1, targets[:, None])
    return torch.autograd.grad(logps.sum(), states)[0]


def checkpointed(states: Tensor, targets: Tensor, head: nn.Linear) -> Tensor:
    """Return that gradient from chunks whose logits are made again in the backward."""

    def chunk(h: Tensor, y: Tensor) -> Tensor:
        return head(h).float().log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)

    parts = zip(states.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    logps = torch.cat([checkpoint(chunk, h, y, use_reentrant=False) for h, y in parts])
    return torch.autograd.grad(logps.sum(), states)[0]


def score(states: Tensor, targets: Tensor, head: nn.Linear) -> Tensor:
    """Return that gradient from the loss head."""
    return torch.autograd.grad(score_tokens(states, targets, head).logps.sum(), states)[0]


def score_kept(states: Tensor, targets: Tensor, head: nn.Linear, kept: Tensor) -> Tensor:
    """Return that gradient of some positions alone."""
    return torch.autograd.grad(score_tokens(states[kept], targets[kept], head).logps.sum(), states)[0]


CONTESTANTS: dict[str, Callable[[Tensor, Tensor, nn.Linear, Tensor], Tensor]] = {
    "naive": lambda states, targets, head, kept: naive(states, targets, head),
    "checkpoint": lambda states, targets, head, kept: checkpointed(states, targets, head),
    "ours": lambda states, targets, head, kept: score(states, targets, head),
    "sparse": score_kept,
}


def distance(ours: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


def extra_kib(name: str, shape: Shape, dtype: str) -> int:
    """Return the peak resident size of one pass in this process over what it held before."""
    CONTESTANTS[name](*problem((8, 8, 64), dtype))  # libraries load what they need
    states, targets, head, kept = problem(shape, dtype)
    before = resident_kib()
    if peak_kib() - before > 16_384:
        raise RuntimeError("setting up took more memory than it left in use, which would hide what the pass takes")
    CONTESTANTS[name](states, targets, head, kept)
    return peak_kib() - before


def resident_kib() -> int:
    """Return the present resident size, from the kernel's status file; elsewhere the peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_kib()
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS"))


def measured(name: str, shape: Shape, dtype: str) -> int:
    """Return `extra_kib` of a process of its own."""
    sizes = (f"--{key}={value}" for key, value in zip(("tokens", "hidden", "vocabulary"), shape, strict=True))
    command = [sys.executable, __file__, "--alone", name, "--dtype", dtype, *sizes]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())

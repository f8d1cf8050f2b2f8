"""A training service's round, forward and backward of many tenants' datums, against how others do it: CPU time.

    python benchmarks/service_recipe.py

Random Qwen3, LoRA r=16 on all linear layers, float32, as many adapters as tenants on both sides. Lengths of datums are
log-normal; the first 60 % of a datum's tokens are a prompt and carry no weight. Two rounds:

- 8 tenants with 4 datums each (hidden 256, 16 layers, vocabulary 16,384: the head is a quarter of the work),
- 16 tenants with one datum of about 42 tokens (hidden 128, 4 layers, vocabulary 8,192).

Ours: one `forward_backward` of a `MultiLoraTransformersModel` with all datums, their weights as `loss_scale`. Theirs,
by hand with PEFT's `set_adapter`, whole logits and recomputed activations, as these services' code does it:

- "padded": each tenant's datums as one padded batch (twinkle-kit's pool; the package itself: vs_twinkle_kit_pool.py),
- "one by one": each datum alone (hosted Tinker servers), its log-probabilities by log_softmax and gather,
- "one by one, no recomputation": the same without what a machine with enough memory need not do; no goal.

Gradients of every tenant are compared before any time counts. Goals, theirs / ours: 2.5 x and 1.8 x in the first round,
4.5 x and 4.5 x in the second.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _pairs import describe_machine, in_turn, ratio
from fused_tenants import TARGETS, Shape, config, make_model
from peft import get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.utils import logging

from twinkle_transformers.pool.multi import MultiLoraTransformersModel
from twinkle_transformers.pool.tenants import matrices_of

TOLERANCE = 2e-6
PROMPT = 0.6


@dataclass(frozen=True)
class Round:
    """A model, its tenants, and how long their datums are.

    Attributes:
        shape: hidden size, layers and vocabulary of the model.
        tenants: adapters, on both sides.
        datums: of each tenant.
        log_length: mean of the logarithm of a datum's length; its deviation is 0.8.
        goals: theirs / ours, by contestant.
    """

    shape: Shape
    tenants: int
    datums: int
    log_length: float
    goals: dict[str, float]


MIXED = Round(Shape(256, 16, 16384, 4, 0), 8, 4, 4.3, {"padded": 2.5, "one by one": 1.8})
SHORT = Round(Shape(128, 4, 8192, 1, 0), 16, 1, 3.0, {"padded": 4.5, "one by one": 4.5})
ROUNDS = {"mixed": MIXED, "short": SHORT}


@dataclass(frozen=True)
class Datum:
    """Tokens `[L + 1]` and the weights `[L]` of the last L of them as targets."""

    tokens: Tensor
    weights: Tensor

    def row(self) -> dict[str, list[float]]:
        """Return it as a row of ours."""
        tokens = self.tokens.tolist()
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "loss_scale": self.weights.tolist()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=ROUNDS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    return 0 if all([play(ROUNDS[name], options.repetitions) for name in ROUNDS if options.only in (None, name)]) else 1


def play(match: Round, repetitions: int) -> bool:
    """Compare gradients, then times, of one round."""
    contest = Contest(match)
    shape = f"hidden {match.shape.hidden}, {match.shape.layers} layers, vocabulary {match.shape.vocabulary:,}"
    print(f"\n{match.tenants} tenants, each {match.datums} of {len(contest.rows)} datums; {shape}")
    print(f"{contest.tokens:,} tokens, {contest.padded_tokens:,} with padding; {contest.agreement()}")
    times = in_turn({"ours": contest.ours, **contest.others}, repetitions)
    print("| | CPU ms | theirs / ours | goal |\n| --- | --- | --- | --- |")
    print(f"| ours | {1e3 * median(times['ours']):.1f} | | |")
    good = True
    for name in contest.others:
        gain, goal = ratio(times[name], times["ours"]), match.goals.get(name)
        good &= goal is None or gain.median >= goal
        wanted = "" if goal is None else f">= {goal}"
        print(f"| {name} | {1e3 * median(times[name]):.1f} | {gain} | {wanted} |")
    return good


class Contest:
    """All sides with the same weights and datums.

    Attributes:
        tokens: of all datums.
        padded_tokens: of each tenant's padded batch.
        others: the contestants by name.
    """

    def __init__(self, match: Round) -> None:
        draw = torch.Generator().manual_seed(3)
        self.datums = {f"t{i}": [_drawn(match, draw) for _ in range(match.datums)] for i in range(match.tenants)}
        lengths = [[len(datum.weights) for datum in mine] for mine in self.datums.values()]
        self.tokens = sum(map(sum, lengths))
        self.padded_tokens = sum(len(mine) * max(mine) for mine in lengths)
        self.rows = [datum.row() for mine in self.datums.values() for datum in mine]
        self.owners = [name for name, mine in self.datums.items() for _ in mine]
        with tempfile.TemporaryDirectory() as folder:
            base = make_model(match.shape, Path(folder))
            self.model = MultiLoraTransformersModel(model_id=folder, mixed_precision="no")
        for index, name in enumerate(self.datums):
            self.model.add_adapter_to_model(name, {"r": 16, "lora_alpha": 32, "target_modules": TARGETS}, seed=index)
            self.model.set_optimizer("AdamW", adapter_name=name)
        self.peer = get_peft_model(base, config(), adapter_name="t0").train()
        for name in list(self.datums)[1:]:
            self.peer.add_adapter(name, config())
        self.adapters = {name: self._shared(name, draw) for name in self.datums}
        alone = partial(self._by_hand, _one_by_one)
        self.others: dict[str, Callable[[], None]] = {
            "padded": partial(self._by_hand, _padded, recompute=True),
            "one by one": partial(alone, recompute=True),
            "one by one, no recomputation": partial(alone, recompute=False),
        }

    def ours(self) -> None:
        """One call with all datums."""
        for name in self.datums:
            self.model.zero_grad(adapter_name=name, flush=True)
        self.model.forward_backward(inputs=self.rows, adapter_name=self.owners)

    def agreement(self) -> str:
        """Compare gradients; returns what to print.

        Raises:
            RuntimeError: they differ, so that no time counts.
        """
        self.ours()
        apart = {}
        for title, run in self.others.items():
            run()
            apart[title] = max(self._apart(name) for name in self.datums)
        if max(apart.values()) > TOLERANCE:
            raise RuntimeError(f"gradients differ: {apart}; no time counts")
        return f"gradients of each tenant within {max(apart.values()):.0e}"

    @torch.no_grad()
    def _shared(self, name: str, draw: torch.Generator) -> dict[str, torch.nn.Parameter]:
        """Give an adapter the same weights on both sides, B included; return the peer's parameters by our names."""
        theirs = dict(self.peer.named_parameters())
        tenant = self.model.pool.tenants[name]
        found = {}
        for key, view in matrices_of(tenant.plan, tenant.flat.data):
            if "lora_B" in key:
                view.copy_(torch.randn(view.shape, generator=draw) * 0.02)
            found[key] = theirs[key.replace(".weight", f".{name}.weight")]
            found[key].copy_(view)
        return found

    def _apart(self, name: str) -> float:
        """Return how far a tenant's gradients are from the peer's, relative to their norm."""
        tenant = self.model.pool.tenants[name]
        if tenant.flat.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        wanted = torch.zeros_like(tenant.flat.grad)
        for key, view in matrices_of(tenant.plan, wanted):
            grad = self.adapters[name][key].grad
            if grad is None:
                raise RuntimeError(f"PEFT's {key} has no gradient")
            view.copy_(grad)
        return float((tenant.flat.grad - wanted).norm() / wanted.norm())

    def _by_hand(self, train: Callable[[torch.nn.Module, list[Datum]], None], *, recompute: bool) -> None:
        """Tenant after tenant."""
        inner = self.peer.base_model.model
        if recompute != inner.is_gradient_checkpointing:
            _set_recomputation(self.peer, recompute)
        for name, mine in self.datums.items():
            self.peer.set_adapter(name)
            for parameter in self.adapters[name].values():
                parameter.grad = None
            train(inner, mine)


def _padded(model: torch.nn.Module, datums: list[Datum]) -> None:
    """Train the datums of a tenant as one padded batch."""
    width = max(len(datum.weights) for datum in datums)
    ids, targets, mask = torch.zeros(3, len(datums), width, dtype=torch.int64)
    weights = torch.zeros(len(datums), width)
    for row, datum in enumerate(datums):
        length = len(datum.weights)
        ids[row, :length], targets[row, :length] = datum.tokens[:-1], datum.tokens[1:]
        mask[row, :length], weights[row, :length] = 1, datum.weights
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.flatten(0, 1)
    losses = cross_entropy(logits, targets.flatten(), reduction="none")
    (losses * weights.flatten()).sum().backward()  # type: ignore[no-untyped-call]


def _one_by_one(model: torch.nn.Module, datums: list[Datum]) -> None:
    """Train the datums of a tenant each alone."""
    for datum in datums:
        ids = datum.tokens[None, :-1]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        logps = logits.log_softmax(-1).gather(-1, datum.tokens[1:, None]).squeeze(-1)
        (-(logps * datum.weights).sum()).backward()


def _set_recomputation(peer: Any, on: bool) -> None:
    inner = peer.base_model.model
    if on:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        peer.enable_input_require_grads()
    else:
        inner.gradient_checkpointing_disable()
        peer.disable_input_require_grads()


def _drawn(match: Round, draw: torch.Generator) -> Datum:
    length = int((torch.randn(1, generator=draw) * 0.8 + match.log_length).exp().clamp(8, 1024))
    tokens = torch.randint(1, match.shape.vocabulary, (length + 1,), generator=draw)
    weights = torch.ones(length)
    weights[: int(length * PROMPT)] = 0.0
    return Datum(tokens, weights)


if __name__ == "__main__":
    sys.exit(main())

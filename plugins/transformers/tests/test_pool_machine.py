"""Whatever is done to the adapters of a pool, in whatever order, each is what PEFT and AdamW make of its own calls."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pools import LINEAR, Alone, Row, distance, flat_of, lora, make_rows, open_pool

from twinkle.data_format import LossOutput
from twinkle.engine import Operation, OperationError
from twinkle.errors import ArgumentError, NonFiniteError, OperationsFailed, TrainingStateError
from twinkle.testing import tiny_model

CONFIGS: list[dict[str, Any]] = [
    lora(2, lora_alpha=2),
    lora(2, lora_alpha=2),
    lora(3, lora_alpha=4, target_modules=["q_proj", "down_proj"]),
    lora(1, use_rslora=True, lora_alpha=1, target_modules=[*LINEAR, "lm_head"]),
]
NAMES = ["a", "b", "c", "d", "e"]
LEARNING_RATES = [1e-3, 3e-3, 1e-2]
EPS = 1e-4
"""Of AdamW, large: what rounding leaves of a gradient that is almost 0 would otherwise become whole steps."""


def raises(inputs: Any, outputs: Any) -> LossOutput:
    raise OSError("no")


def is_nan(inputs: Any, outputs: Any) -> LossOutput:
    return LossOutput(outputs["logps"].sum() * float("nan"), 1.0)


class Twin:
    """What an adapter should be: PEFT's model alone, and what was counted."""

    def __init__(self, alone: Alone) -> None:
        self.alone, self.pending, self.updates = alone, 0, 0

    def keep(self) -> dict[str, Any]:
        """Return all of it."""
        alone = self.alone
        return {
            "weights": {name: value.clone() for name, value in alone.weights().items()},
            "gradients": {name: value.clone() for name, value in alone.gradients().items()},
            "optimizer": copy_of(alone.optimizer.state_dict()),
            "counts": (alone.denominator, self.pending, self.updates),
        }

    def put(self, kept: dict[str, Any]) -> None:
        """Be what was kept."""
        self.alone.load(kept["weights"])
        for name, parameter in self.alone.parameters.items():
            gradient = kept["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        self.alone.optimizer.load_state_dict(copy_of(kept["optimizer"]))
        self.alone.denominator, self.pending, self.updates = kept["counts"]


def copy_of(value: Any) -> Any:
    """Return a deep copy of an optimizer's state."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copy_of(entry) for key, entry in value.items()}
    return [copy_of(entry) for entry in value] if isinstance(value, list) else value


lengths = st.lists(st.integers(1, 14), min_size=1, max_size=3)
some = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
"""Numbers of adapters, in the order of their names; those that there are not mean none."""
one = st.integers(0, 2)
seeds = st.integers(0, 10_000)


class Pool(RuleBasedStateMachine):
    """Adds, removes, trains, fails, steps, pages and snapshots adapters at random."""

    folder: Path
    work: Path

    def __init__(self) -> None:
        super().__init__()
        self.twins: dict[str, Twin] = {}
        self.kept: dict[str, tuple[Any, dict[str, Any]]] = {}

    @initialize(share=st.booleans(), budget=st.sampled_from([11, 40, 4096]), seed=seeds)
    def open(self, share: bool, budget: int, seed: int) -> None:
        self.model = open_pool(self.folder, share_prefixes=share, tokens_per_pass=budget)
        for at, name in enumerate(NAMES[:3]):
            self.add(name, CONFIGS[(seed + at) % len(CONFIGS)], LEARNING_RATES[at], seed + at)

    def here(self, numbers: list[int]) -> list[str]:
        names = sorted(self.twins)
        return [names[number] for number in numbers if number < len(names)]

    @rule(name=st.sampled_from(NAMES), config=st.sampled_from(CONFIGS), lr=st.sampled_from(LEARNING_RATES), seed=seeds)
    def add(self, name: str, config: dict[str, Any], lr: float, seed: int) -> None:
        if name in self.twins:
            with pytest.raises(ArgumentError, match="already exists"):
                self.model.add_adapter_to_model(name, config)
            return
        self.model.add_adapter_to_model(name, config, seed=seed)
        self.model.set_optimizer("AdamW", lr=lr, eps=EPS, adapter_name=name)
        weights = self.model.get_state_dict(adapter_name=name)
        self.twins[name] = Twin(Alone(self.folder, config, weights, lr=lr, weight_decay=0.01, eps=EPS))

    @precondition(lambda self: len(self.twins) > 2)
    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name not in self.twins:
            with pytest.raises(ArgumentError, match="no adapter"):
                self.model.remove_adapter(name)
            return
        self.model.remove_adapter(name)
        del self.twins[name]
        self.kept.pop(name, None)

    @rule(numbers=some, sizes=lengths, seed=seeds, base=st.booleans())
    def train(self, numbers: list[int], sizes: list[int], seed: int, base: bool) -> None:
        batches = {name: self.rows(sizes, seed + at) for at, name in enumerate(self.here(numbers))}
        rows = [row for batch in batches.values() for row in batch]
        owners: list[str | None] = [name for name, batch in batches.items() for _ in batch]
        if base:
            rows, owners = [*rows, *self.rows(sizes, seed)], [*owners, *[None] * len(sizes)]
        outputs = self.model.forward_backward(inputs=rows, adapter_name=owners)
        losses = {name: output["loss"] for name, output in zip(owners, outputs, strict=True) if name}
        for name, batch in batches.items():
            self.expect(name, batch, losses[name])

    @rule(numbers=some, seed=seeds, loss=st.sampled_from([raises, is_nan]), row=st.sampled_from([None, 300]))
    def fail(self, numbers: list[int], seed: int, loss: Any, row: int | None) -> None:
        """The first of the adapters fails."""
        mine = self.here(numbers)
        if not mine:
            return
        batches = {name: self.rows([9], seed + at) for at, name in enumerate(mine)}
        if row is not None:
            batches[mine[0]] = [{"input_ids": [row], "labels": [1]}]
        operations = [Operation(name, "forward_backward", batch) for name, batch in batches.items()]
        if row is None:
            operations[0].loss = loss
        results = self.model.pool.run(operations)
        assert isinstance(results[0], OperationError)
        for name, result in zip(mine[1:], results[1:], strict=True):
            self.expect(name, batches[name], result.loss_sum / result.denominator)

    @rule(numbers=some, bound=st.sampled_from([0.0, 0.5]), single=st.booleans())
    def step(self, numbers: list[int], bound: float, single: bool) -> None:
        mine = self.here(numbers)
        if idle := [name for name in mine if not self.twins[name].pending]:
            with pytest.raises(TrainingStateError, match="no accumulated gradients"):
                self.model.clip_grad_and_step(bound, adapter_name=idle)
        due = [name for name in mine if self.twins[name].pending]
        if single:
            for name in due:
                self.model.clip_grad_and_step(bound, adapter_name=name)
            norms = [self.model.optimizer_group[name].last_grad_norm for name in due]
        else:
            norms = self.model.clip_grad_and_step(bound, adapter_name=due)
        for name, norm in zip(due, norms, strict=True):
            twin = self.twins[name]
            # after tens of updates AdamW has made rounding of 1e-6 into differences of weights that a norm shows
            assert norm == pytest.approx(twin.alone.step(bound), rel=1e-3 + 2e-4 * twin.updates, abs=1e-6)
            twin.pending, twin.updates = 0, twin.updates + 1

    @rule(numbers=some, sizes=lengths, seed=seeds, bound=st.sampled_from([0.0, 0.5]))
    def train_and_step(self, numbers: list[int], sizes: list[int], seed: int, bound: float) -> None:
        self.train(numbers, sizes, seed, base=False)
        self.step(numbers, bound, single=False)

    @precondition(lambda self: any(twin.alone.denominator for twin in self.twins.values()))
    @rule()
    def spoil(self) -> None:
        """A step whose gradient is no number is not made; the gradient is gone."""
        name = next(name for name, twin in self.twins.items() if twin.alone.denominator)
        flat_of(self.model, name).grad[0] = float("nan")
        with pytest.raises((NonFiniteError, OperationsFailed)):
            self.model.clip_grad_and_step(adapter_name=name)
        twin = self.twins[name]
        twin.alone.optimizer.zero_grad()
        twin.alone.denominator, twin.pending = 0.0, 0

    @rule(number=one, to=st.sampled_from(["device", "host", "disk"]))
    def page(self, number: int, to: Any) -> None:
        for name in self.here([number]):
            self.model.pool.page(name, to, self.work if to == "disk" else None)

    @rule(number=one, back=st.booleans())
    def snapshot(self, number: int, back: bool) -> None:
        name = sorted(self.twins)[min(number, len(self.twins) - 1)]
        if back and name in self.kept:
            snapshot, kept = self.kept[name]
            self.model.pool.restore(name, snapshot)
            self.twins[name].put(kept)
        else:
            self.kept[name] = self.model.pool.snapshot(name), self.twins[name].keep()

    @rule(numbers=some, sizes=lengths, seed=seeds)
    def evaluate(self, numbers: list[int], sizes: list[int], seed: int) -> None:
        rows = self.rows(sizes, seed)
        mine = self.here(numbers)
        outputs = self.model.forward_only(
            inputs=rows * len(mine) + rows, adapter_name=[*(n for n in mine for _ in rows), *[None] * len(rows)]
        )
        for at, name in enumerate(mine):
            with torch.no_grad():
                for row, output in zip(rows, outputs[at * len(rows) :], strict=False):
                    torch.testing.assert_close(output["logps"], self.twins[name].alone.logps(row), rtol=0, atol=1e-3)

    def rows(self, sizes: list[int], seed: int) -> list[Row]:
        return make_rows(len(sizes), sizes, seed)

    def expect(self, name: str, rows: list[Row], loss: float) -> None:
        twin = self.twins[name]
        assert loss == pytest.approx(twin.alone.backward(rows), rel=1e-4)
        twin.pending += 1

    @invariant()
    def each_is_what_it_would_be_alone(self) -> None:
        for name, twin in self.twins.items():
            group = self.model.optimizer_group[name]
            assert (group.pending, group.updates, group.denominator) == (
                twin.pending, twin.updates, twin.alone.denominator
            )  # fmt: skip

    def teardown(self) -> None:
        for name, twin in self.twins.items():
            weights = twin.alone.weights()
            for key, value in self.model.get_state_dict(adapter_name=name).items():
                assert distance(value, weights[key]) < 1e-3, (name, key)
            gradients = twin.alone.gradients()
            mine = self.model.pool.tenants[name].views()
            if twin.pending and gradients:
                pairs = [(mine[key].grad.ravel(), gradients[key].ravel()) for key in gradients]
                assert distance(*map(torch.cat, zip(*pairs, strict=True))) < 2e-3, name


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[Pool]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Pool.folder = tiny_model(
        tmp_path / "model",
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    Pool.work = tmp_path
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield Pool
    torch.set_num_threads(threads)


def run(machine: type[Pool], examples: int, steps: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=quiet,
            database=None,
            phases=[Phase.generate],
        ),
    )


@pytest.mark.full
def test_adapters_are_what_each_would_be_alone(machine: type[Pool]) -> None:
    run(machine, 12, 25)


@pytest.mark.soak
def test_adapters_are_what_each_would_be_alone_for_long(machine: type[Pool]) -> None:
    run(machine, 150, 60)

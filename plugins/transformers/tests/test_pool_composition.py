"""Numbers are functions of operations: how passes are composed is recorded, and one is computed again as it was.

The neighbours of a pass that is computed again are placeholders of their shapes, so that one operation alone gets the
bits that it had among many.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import (
    LINEAR,
    distance,
    flat_of,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    open_pool,
)
from rounding import rounds_by_rows  # noqa: F401 - a fixture
from threads import one_thread  # noqa: F401 - a fixture
from torch import Tensor

from twinkle.engine import Operation, OperationResult
from twinkle.errors import ArgumentError
from twinkle.testing import tiny_model

pytestmark = pytest.mark.usefixtures("rounds_by_rows")  # on some machines tiny products round alike at any size
TARGETS = (LINEAR, ["q_proj", "v_proj"], LINEAR, [*LINEAR[4:], "lm_head"])
COUNT = 6


def opened(folder: Path, **options: Any) -> Any:
    """Return a pool of adapters of several ranks, targets and rates of dropout, none of them where it began."""
    model = open_pool(folder, **options)
    for number in range(COUNT):
        model.add_adapter_to_model(
            f"t{number}",
            lora((4, 8, 3)[number % 3], target_modules=TARGETS[number % 4], lora_dropout=0.1 * (number == 4)),
            seed=number,
        )
        draw = torch.Generator().manual_seed(50 + number)
        with torch.no_grad():
            flat_of(model, f"t{number}").copy_(0.05 * torch.randn(flat_of(model, f"t{number}").shape, generator=draw))
    return model


def operations(seed: int) -> list[Operation]:
    """Return what comes together: operations of several adapters (and the base model), of any shape, loss and kind."""
    draw, made = random.Random(seed), []
    for number in draw.sample(range(COUNT), draw.randint(2, COUNT)):
        for again in range(draw.choice([1, 1, 2])):
            rows = make_rows(draw.randint(1, 5), [draw.randint(2, 20) for _ in range(5)], seed=draw.randrange(1000))
            kind = "forward" if draw.random() < 0.2 else "forward_backward"
            loss = draw.choice(["CrossEntropyLoss", "GRPOLoss"])
            inputs = {"advantages": [1.0 - 2 * (i % 2) for i in range(len(rows))]} if loss == "GRPOLoss" else {}
            made.append(Operation(f"t{number}", kind, rows, loss, inputs, number=10 * seed + again))
    if draw.random() < 0.5:
        made.append(Operation(None, "forward", make_rows(2, 9, seed=seed)))
    return made


def forget(model: Any) -> None:
    for name in model.pool.tenants.names():
        model.zero_grad(adapter_name=name)


def computed(model: Any, wanted: list[Operation]) -> tuple[list[OperationResult], dict[str, Tensor]]:
    """Run operations in one call and return their results and the gradients that they added up to."""
    results = model.pool.run(wanted)
    for result in results:
        assert isinstance(result, OperationResult), result
    grads = {f"t{n}": flat_of(model, f"t{n}").grad for n in range(COUNT)}
    grads = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    forget(model)
    return results, grads


def again(operation: Operation, result: OperationResult) -> Operation:
    """Return an operation that is to be computed as it was, from what a file would keep of its composition."""
    kept = json.loads(json.dumps(result.composition))
    return Operation(
        operation.adapter, operation.kind, operation.rows, operation.loss, operation.loss_inputs,
        number=operation.number, composition=kept,
    )  # fmt: skip


def same(one: OperationResult, other: OperationResult) -> bool:
    if one.loss_sum != other.loss_sum:
        return False
    rows = zip(one.outputs, other.outputs, strict=True)
    return all(torch.equal(a["logps"], b["logps"]) for a, b in rows if "logps" in a)


@pytest.mark.sample(4)
@pytest.mark.parametrize("budget", [16_384, 60])
@pytest.mark.parametrize("seed", range(6))
def test_an_operation_alone_gets_the_bits_that_it_had_among_others(folder: Path, seed: int, budget: int) -> None:
    model = opened(folder, tokens_per_pass=budget)
    wanted = operations(seed)
    results, grads = computed(model, wanted)
    assert (
        budget == 60
        or len(grads) == 1
        or any(
            not torch.equal(computed(model, [o for o in wanted if o.adapter == name])[1][name], grads[name])
            for name in grads
        )
    ), "composed anew, numbers differ in the last places"
    for name in grads:
        mine = [at for at, operation in enumerate(wanted) if operation.adapter == name]
        found, alone = computed(model, [again(wanted[at], results[at]) for at in mine])
        assert all(same(results[at], result) for at, result in zip(mine, found, strict=True))
        assert alone.keys() == {name}, "placeholders add nothing to anybody"
        assert torch.equal(alone[name], grads[name]), distance(alone[name], grads[name])


def test_any_of_those_that_shared_a_pass_may_be_computed_again_together(folder: Path) -> None:
    model, wanted = opened(folder), operations(3)
    results, grads = computed(model, wanted)
    some = [at for at, operation in enumerate(wanted) if operation.adapter is not None][::2]
    found, _ = computed(model, [again(wanted[at], results[at]) for at in some])
    assert all(same(results[at], result) for at, result in zip(some, found, strict=True))
    passes = [entry["pass"] for result in found for entry in result.composition]
    assert len(set(passes)) == len({entry["pass"] for at in some for entry in results[at].composition})
    assert grads


@pytest.mark.full
def test_the_weights_of_neighbours_do_not_matter(folder: Path) -> None:
    """What they are by now is another state than the one that they shared the pass with."""
    model, wanted = opened(folder), operations(0)
    results, grads = computed(model, wanted)
    first, *others = grads
    assert others
    for name in others:
        with torch.no_grad():
            flat_of(model, name).mul_(-3.0)
    mine = [at for at, operation in enumerate(wanted) if operation.adapter == first]
    _, alone = computed(model, [again(wanted[at], results[at]) for at in mine])
    assert torch.equal(alone[first], grads[first])


@pytest.mark.full
@pytest.mark.parametrize("budget", [16_384, 60])
def test_an_adapter_alone_gets_the_same_bits_however_many_of_its_operations_wait(folder: Path, budget: int) -> None:
    model = opened(folder, tokens_per_pass=budget)
    wanted = [
        Operation("t0", "forward_backward", make_rows(3, (7, 12, 30), seed=at), "CrossEntropyLoss", number=at)
        for at in range(4)
    ]
    results, grads = computed(model, wanted)
    for operation, result in zip(wanted, results, strict=True):
        found = model.pool.run([operation])[0]
        assert same(result, found)
    assert torch.equal(flat_of(model, "t0").grad, grads["t0"])


@pytest.mark.full
def test_a_pass_that_was_cut_for_want_of_memory_is_cut_so_again(folder: Path, monkeypatch: Any) -> None:
    model, wanted = opened(folder), operations(2)
    forward, failed = model.pool.passes.forward, []

    def short(parts: Any, free: Any = None) -> Any:
        if sum(part.tokens for part in parts) > 40 and len(failed) < 20:
            failed.append(parts)
            raise torch.OutOfMemoryError("no room")
        return forward(parts, free)

    monkeypatch.setattr(model.pool.passes, "forward", short)
    results, grads = computed(model, wanted)
    assert failed
    monkeypatch.undo()
    for name in grads:
        mine = [at for at, operation in enumerate(wanted) if operation.adapter == name]
        _, alone = computed(model, [again(wanted[at], results[at]) for at in mine])
        assert torch.equal(alone[name], grads[name]), name


def test_a_composition_that_is_not_the_operations_own_is_refused(folder: Path) -> None:
    model = opened(folder)
    wanted = [Operation("t0", "forward_backward", make_rows(count, 8, seed=1), "CrossEntropyLoss") for count in (2, 3)]
    results, _ = computed(model, wanted[:1])
    [refused] = model.pool.run([again(wanted[1], results[0])])
    assert isinstance(refused.error, ArgumentError)
    assert "composition must cover the 3 rows" in str(refused.error)
    broken = Operation("t0", "forward_backward", wanted[0].rows, "CrossEntropyLoss", composition=[{"pass": 1}])
    assert "composition must be" in str(model.pool.run([broken])[0].error)
    assert flat_of(model, "t0").grad is None


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_it_holds_for_models_of_other_kinds(tmp_path: Path, kind: str) -> None:
    model = open_pool(tiny_model(tmp_path / kind, kind))
    for name, rank in (("t0", 4), ("t1", 8), ("t2", 4)):
        model.add_adapter_to_model(name, {"r": rank, "train_attn": True, "train_mlp": True}, seed=rank)
        with torch.no_grad():
            flat_of(model, name).add_(0.05)
    wanted = [
        Operation(f"t{at}", "forward_backward", make_rows(2, (5 + at, 13), seed=at), "CrossEntropyLoss", number=1)
        for at in range(3)
    ]
    results = model.pool.run(wanted)
    grads = [flat_of(model, f"t{at}").grad.clone() for at in range(3)]
    forget(model)
    for at, result in enumerate(results):
        assert isinstance(model.pool.run([again(wanted[at], result)])[0], OperationResult)
        assert torch.equal(flat_of(model, f"t{at}").grad, grads[at])

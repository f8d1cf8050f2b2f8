"""Several weighted targets a position: in a pool's pass, beside tenants with one, and in a plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pools import (
    VOCABULARY,
    Alone,
    distance,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    open_pool,
)
from threads import one_thread  # noqa: F401 - a fixture
from torch import Tensor

from twinkle.engine import Operation, OperationError, OperationResult, Step
from twinkle.errors import DataError
from twinkle.model import TransformersModel

Targets = dict[str, Any]
HEADS = {"linear layers": lora(), "the head too": lora(target_modules=["q_proj", "down_proj", "lm_head"])}


def with_targets(lengths: list[int], several: int, seed: int) -> list[Targets]:
    """Return rows with `several` weighted targets a position, some of them absent, some weights negative."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for row in make_rows(len(lengths), lengths, seed):
        size = len(row["input_ids"])
        labels = torch.randint(0, VOCABULARY, (size, several), generator=draw)
        labels[torch.rand(size, several, generator=draw) < 0.2] = -100
        labels[1] = -100
        weights = torch.randn(size, several, generator=draw)
        rows.append({"input_ids": row["input_ids"], "labels": labels, "loss_scale": weights})
    return rows


def plain(rows: list[Targets]) -> list[Targets]:
    return [{**row, "loss_scale": [1.0] * len(row["input_ids"])} for row in rows]


def operation(name: str, rows: list[Targets], kind: Any = "forward_backward") -> Operation:
    return Operation(name, kind, rows, loss="cross_entropy")


def pool_of(folder: Path, config: dict[str, Any], *names: str) -> Any:
    model = open_pool(folder)
    for number, name in enumerate(names):
        model.add_adapter_to_model(name, config, seed=number)
        model.set_optimizer("AdamW", adapter_name=name, lr=1e-2)
    return model


def done(model: Any, *operations: Operation) -> list[OperationResult]:
    results = model.pool.run(list(operations))
    assert not [result.error for result in results if isinstance(result, OperationError)]
    found: list[OperationResult] = results
    return found


def wanted_of(alone: Alone, rows: list[Targets]) -> tuple[Tensor, list[Tensor]]:
    """Return the loss `-sum w lp` of rows in PEFT's model, and the scores of their targets."""
    total, scores = torch.zeros(()), []
    for row in rows:
        labels, weights = torch.as_tensor(row["labels"]), torch.as_tensor(row["loss_scale"])
        table = alone.logits(row).log_softmax(-1)
        mine = table.gather(-1, labels.clamp(min=0).view(len(labels), -1)).view(labels.shape) * (labels != -100)
        scores.append(mine.detach())
        total = total - (mine * weights).sum()
    return total, scores


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_scores_loss_and_gradients_are_those_of_pefts_model(folder: Path, config: dict[str, Any]) -> None:
    model = pool_of(folder, config, "a")
    rows = with_targets([9, 5, 12], 3, seed=1)
    alone = Alone(folder, config, model.get_state_dict(adapter_name="a"))
    (result,) = done(model, operation("a", rows))
    total, scores = wanted_of(alone, rows)
    assert result.loss_sum == pytest.approx(float(total.detach()), rel=1e-5)
    for output, score, row in zip(result.outputs, scores, rows, strict=True):
        assert output["logps"].shape == torch.Size([len(row["input_ids"]), 3])
        torch.testing.assert_close(output["logps"], score, rtol=1e-4, atol=1e-5)
    assert result.denominator == sum(int((row["labels"] != -100).any(-1).sum()) for row in rows)
    total.backward()  # type: ignore[no-untyped-call]
    model.set_optimizer("SGD", adapter_name="a", lr=1.0, weight_decay=0.0)
    before = model.get_state_dict(adapter_name="a")
    model.pool.step([Step("a", divide=False)])
    after = model.get_state_dict(adapter_name="a")
    for name, gradient in alone.gradients().items():
        assert distance(before[name] - after[name], gradient) < 1e-4, name


@pytest.mark.full
def test_tenants_with_one_target_get_the_same_bits_beside_them(folder: Path, one_thread: None) -> None:
    rows = {
        "a": plain(make_rows(3, 16, seed=2)),
        "b": with_targets([16] * 3, 4, seed=3),
        "c": plain(make_rows(3, 16, 4)),
    }
    found = {}
    for names in (("a", "b", "c"), ("a",), ("b",), ("c",)):
        model = pool_of(folder, lora(), "a", "b", "c")
        results = done(model, *(operation(name, rows[name]) for name in names))
        for name, result in zip(names, results, strict=True):
            mine = [result.loss_sum, torch.cat([o["logps"].flatten() for o in result.outputs])]
            mine.append(model.pool.tenants[name].flat.grad.clone())
            found.setdefault(name, []).append(mine)
    for name, (together, alone) in found.items():
        assert together[0] == alone[0], name
        assert torch.equal(together[1], alone[1]), name
        assert torch.equal(together[2], alone[2]), name


def test_rows_of_one_operation_may_have_different_numbers_of_targets(folder: Path) -> None:
    model = pool_of(folder, lora(), "a")
    several, single = with_targets([9, 7], 3, seed=5), plain(make_rows(2, [6, 11], seed=6))
    mixed = [several[0], single[0], single[1], several[1]]
    (result,) = done(model, operation("a", mixed, "forward"))
    assert [tuple(output["logps"].shape) for output in result.outputs] == [(9, 3), (6,), (11,), (7, 3)]
    apart = done(model, operation("a", several, "forward"), operation("a", single, "forward"))
    assert result.loss_sum == pytest.approx(apart[0].loss_sum + apart[1].loss_sum, rel=1e-5)
    for output, other in zip(result.outputs[1:3], apart[1].outputs, strict=True):
        torch.testing.assert_close(output["logps"], other["logps"], rtol=1e-5, atol=1e-5)


def test_one_target_in_a_table_is_one_target(folder: Path) -> None:
    model = pool_of(folder, lora(), "a")
    rows = plain(make_rows(3, [9, 5, 12], seed=7))
    tables = [
        {**row, "labels": [[y] for y in row["labels"]], "loss_scale": [[w] for w in row["loss_scale"]]} for row in rows
    ]
    one, other = done(model, operation("a", rows, "forward"), operation("a", tables, "forward"))
    assert one.loss_sum == pytest.approx(other.loss_sum, rel=1e-6)
    for mine, table in zip(one.outputs, other.outputs, strict=True):
        assert table["logps"].shape[1:] == (1,)
        torch.testing.assert_close(mine["logps"], table["logps"][:, 0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("loss", "inputs", "said"),
    [
        ("ppo", {"old_logps": [[0.0] * 6], "advantages": [[1.0] * 6]}, "one label"),
        ("GRPOLoss", {"advantages": [1.0]}, "one label"),
        ("CrossEntropyLoss", {}, "one label"),
    ],
)
def test_losses_of_one_target_say_so(folder: Path, loss: str, inputs: dict[str, Any], said: str) -> None:
    model = pool_of(folder, lora(), "a", "b")
    good = operation("b", plain(make_rows(2, 8, seed=8)))
    rows = [{key: value for key, value in row.items() if key != "loss_scale"} for row in with_targets([6], 2, seed=9)]
    failed, result = model.pool.run([Operation("a", "forward_backward", rows, loss=loss, loss_inputs=inputs), good])
    assert isinstance(failed, OperationError)
    with pytest.raises(DataError, match=said):
        raise failed.error
    assert isinstance(result, OperationResult)
    assert model.pool.tenants["a"].flat.grad is None


def test_a_target_outside_the_vocabulary_is_refused_by_row(folder: Path) -> None:
    model = pool_of(folder, lora(), "a")
    rows = with_targets([6, 6], 2, seed=9)
    rows[1]["labels"][3, 1] = VOCABULARY + 7
    (failed,) = model.pool.run([operation("a", rows)])
    with pytest.raises(DataError, match=rf"row 1 of the batch: labels\[3\] is {VOCABULARY + 7}"):
        raise failed.error


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"padding_free": True}, {"padding_side": "left"}], ids=str)
def test_a_plain_model_trains_on_them_in_any_split(folder: Path, options: dict[str, Any]) -> None:
    rows = [*with_targets([9, 5], 3, seed=1), *with_targets([7], 2, seed=2)]
    found = []
    for size in (None, 1):
        model = TransformersModel(model_id=str(folder), mixed_precision="no")
        torch.manual_seed(0)
        model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
        model.set_processor("InputProcessor", **options)
        model.set_loss("cross_entropy")
        model.set_optimizer("AdamW", lr=1e-3)
        output = model.forward_backward(inputs=rows, micro_batch_size=size)
        assert output["logps"].shape == (3, 9, 3)
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        assert "accuracy" not in numbers
        found.append((output["loss"], output["num_tokens"], float(numbers["grad_norm"])))
    assert found[0] == pytest.approx(found[1], rel=1e-4)

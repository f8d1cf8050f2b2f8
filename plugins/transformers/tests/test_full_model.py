"""All parameters of a model behind the contract of an engine: rank 0."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from twinkle.engine import AdapterSpec, Operation, OperationError, OperationResult, Step
from twinkle.errors import ArgumentError, CapacityError, CheckpointError, Unsupported
from twinkle.testing import tiny_model
from twinkle_transformers.engine import TransformersEngine
from twinkle_transformers.model import TransformersModel

SPEC = AdapterSpec(0, seed=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("full") / "model")


@pytest.fixture
def engine(base: Path) -> Iterator[TransformersEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TransformersEngine(str(base), model={"mixed_precision": "no"})
    torch.set_num_threads(threads)


def row(*tokens: int) -> dict[str, Any]:
    return {"input_ids": list(tokens), "labels": [*tokens[1:], -100]}


ROWS = [[row(5, 6, 7, 8), row(9, 10, 11)], [row(20, 21, 22)], [row(30, 31, 32, 33, 34), row(40, 41)]]


def train(engine: TransformersEngine, ref: Any, rows: Any) -> OperationResult:
    (result,) = engine.run([Operation(ref, "forward_backward", rows)])
    assert isinstance(result, OperationResult), result
    return result


def weights(engine: TransformersEngine, ref: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in engine.as_model().get_state_dict(adapter_name=ref.name).items()}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_it_trains_as_the_local_model_and_leaves_the_base_alone(engine: TransformersEngine, base: Path) -> None:
    adapter = engine.add("a", AdapterSpec(2, seed=1))
    forward = Operation(adapter, "forward", ROWS[0])
    (before,) = engine.run([forward])
    ref = engine.add("whole", SPEC)
    engine.set_optimizer(ref, "AdamW", lr=1e-2)
    local = TransformersModel(model_id=str(base), mixed_precision="no")
    local.set_optimizer("AdamW", lr=1e-2)
    for rows in ROWS:
        mixed = engine.run([forward, Operation(ref, "forward_backward", rows)])
        assert isinstance(mixed[0], OperationResult)
        result: Any = mixed[1]
        expected = local.forward_backward(inputs=rows)
        assert result.loss_sum / result.denominator == pytest.approx(expected["loss"], abs=1e-6)
        assert [len(output["logps"]) for output in result.outputs] == [len(r["input_ids"]) for r in rows]
        (stepped,) = engine.step([Step(ref, max_grad_norm=0.5)])
        assert stepped.grad_norm == pytest.approx(local.clip_grad_norm(0.5), rel=1e-5)  # type: ignore[union-attr]
        local.step()
        local.zero_grad()
    for name, tensor in local.get_state_dict().items():
        torch.testing.assert_close(weights(engine, ref)[name], tensor, rtol=0, atol=1e-6)
    assert engine.bytes_of(ref).device > 4 * sum(t.numel() for t in weights(engine, ref).values())
    assert engine.usage(ref).tokens == sum(len(r["input_ids"]) for rows in ROWS for r in rows)
    engine.remove(ref)
    (after,) = engine.run([forward])
    for one, other in zip(before.outputs, after.outputs, strict=True):  # type: ignore[union-attr]
        assert torch.equal(torch.as_tensor(one["logps"]), torch.as_tensor(other["logps"]))


def test_a_snapshot_in_the_middle_of_an_accumulation_goes_on_with_the_same_bits(
    engine: TransformersEngine, base: Path, tmp_path: Path
) -> None:
    ref = engine.add("whole", SPEC)
    engine.as_model().set_optimizer("AdamW", lr=1e-2, adapter_name="whole")
    engine.as_model().set_lr_scheduler("LinearLR", total_iters=3, adapter_name="whole")
    train(engine, ref, ROWS[0])
    engine.step([Step(ref)])
    train(engine, ref, ROWS[1])
    engine.snapshot(ref).write(tmp_path)
    assert engine.read_spec(tmp_path) == SPEC

    def go_on(engine: TransformersEngine, ref: Any) -> Any:
        result = train(engine, ref, ROWS[2])
        (step,) = engine.step([Step(ref, max_grad_norm=1.0)])
        metrics = engine.as_model().calculate_metric(True, adapter_name=ref.name)
        return result.loss_sum, step, metrics["loss"], metrics["grad_norm"], engine.progress(ref), weights(engine, ref)

    *numbers, final = go_on(engine, ref)
    again = TransformersEngine(str(base), model={"mixed_precision": "no"})
    restored = again.add("other", SPEC)
    again.as_model().set_optimizer("AdamW", lr=1e-2, adapter_name="other")
    again.as_model().set_lr_scheduler("LinearLR", total_iters=3, adapter_name="other")
    again.restore(restored, tmp_path)
    *found, last = go_on(again, restored)
    assert found == numbers
    assert same(last, final)
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), dict(_read(tmp_path)))


def _read(folder: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_an_operation_that_fails_changes_nothing(engine: TransformersEngine) -> None:
    ref = engine.add("whole", SPEC)
    engine.set_optimizer(ref, "AdamW", lr=1e-2)
    train(engine, ref, ROWS[0])
    kept = {name: p.grad.clone() for name, p in engine._full.parameters().items()}  # type: ignore[union-attr]

    def breaks(inputs: Any, outputs: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) and bool((inputs["input_ids"] == 41).any()):
            raise ValueError("this row")
        return {"loss": outputs["logps"].sum(), "num_tokens": 1}

    rows = [row(*range(50, 60 + 2 * i)) for i in range(3)] + [row(40, 41)]
    engine._full._pass_tokens = 4  # type: ignore[union-attr]
    (failed,) = engine.run([Operation(ref, "forward_backward", rows, breaks)])
    assert isinstance(failed, OperationError)
    assert "this row" in str(failed.error)
    assert engine.progress(ref).pending == 1
    assert same({name: p.grad for name, p in engine._full.parameters().items()}, kept)  # type: ignore[union-attr]
    assert isinstance(engine.step([Step(replace(ref, generation=9))])[0], OperationError)


def test_what_it_refuses(engine: TransformersEngine, tmp_path: Path) -> None:
    ref = engine.add("whole", SPEC)
    with pytest.raises(CapacityError, match="one full model fits at a time"):
        engine.add("second", SPEC)
    with pytest.raises(Unsupported, match="stays on the device"):
        engine.page(ref, "host")
    with pytest.raises(ArgumentError, match="already exists"):
        engine.add("whole", AdapterSpec(2))
    adapter = engine.add("a", AdapterSpec(2))
    engine.snapshot(adapter).write(tmp_path)
    with pytest.raises(CheckpointError, match="not of a full model"):
        engine.restore(ref, tmp_path)
    engine.remove(ref)
    with pytest.raises(ArgumentError, match="are of adapters"):
        engine.add("whole", replace(SPEC, dropout=0.1))

"""The pool's own contract: operations in, results out, whatever else is in it, in other threads and on other ranks."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from pools import (
    Row,
    distance,
    flat_of,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    moments_of,
    open_pool,
)
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.engine import Operation, OperationError, OperationResult
from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.pool.pool import LoraPool


def adapters(folder: Path, count: int = 3, **options: Any) -> Any:
    model = open_pool(folder, **options)
    for number in range(count):
        model.add_adapter_to_model(f"t{number}", lora(2 + number % 3), seed=number)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=f"t{number}")
    return model


def train(model: Any, names: list[str], seed: int, length: int = 9) -> None:
    rows = [row for name in names for row in make_rows(1, length, seed=seed + 100 * int(name[1:]))]
    model.forward_backward(inputs=rows, adapter_name=names)
    model.clip_grad_and_step(adapter_name=names)


# results


def test_a_result_says_what_an_operation_gave_and_what_its_adapter_got(folder: Path) -> None:
    model = adapters(folder)
    rows = make_rows(3, (9, 5, 12), seed=1)
    assert isinstance(model.pool, LoraPool)
    results = model.pool.run(
        [
            Operation("t0", "forward_backward", rows),
            Operation(None, "forward", rows),
            Operation("t1", "forward", rows, loss="CrossEntropyLoss"),
            Operation("t2", "forward", rows),
        ]
    )
    assert all(isinstance(result, OperationResult) for result in results)
    for result in results:
        assert [len(output["logps"]) for output in result.outputs] == [9, 5, 12]
        assert not any(output["logps"].requires_grad for output in result.outputs)
        assert result.usage.tokens == 26
    for result in (results[0], results[2]):
        assert result.loss_sum == pytest.approx(-sum(float(o["logps"].sum()) for o in result.outputs), rel=1e-5)
        assert result.denominator == 23
    assert results[1].loss_sum is None
    assert results[3].loss_sum is None
    assert flat_of(model, "t0").grad is not None
    assert model.optimizer_group["t0"].denominator == 23
    for name in ("t1", "t2"):
        assert flat_of(model, name).grad is None
        assert model.optimizer_group[name].denominator == 0


def test_operations_of_one_adapter_add_up(folder: Path) -> None:
    model, other = adapters(folder), adapters(folder)
    rows = make_rows(4, 9, seed=1)
    model.pool.run([Operation("t0", "forward_backward", rows[:2]), Operation("t0", "forward_backward", rows[2:])])
    other.pool.run([Operation("t0", "forward_backward", rows)])
    assert distance(flat_of(model, "t0").grad, flat_of(other, "t0").grad) < 2e-6
    assert model.optimizer_group["t0"].denominator == other.optimizer_group["t0"].denominator
    assert model.optimizer_group["t0"].pending == 2


def test_no_operations_are_no_results(folder: Path) -> None:
    assert adapters(folder).pool.run([]) == []


def test_a_loss_of_an_operation_comes_in_place_of_the_adapter_s_own(folder: Path) -> None:
    model = adapters(folder)
    rows = make_rows(2, 9, seed=1)
    [result] = model.pool.run([Operation("t0", "forward_backward", rows, "GRPOLoss", {"advantages": [1.0, -1.0]})])
    assert isinstance(result, OperationResult)
    assert result.denominator == 2
    assert result.metrics.keys() >= {"clip_ratio", "approx_kl"}
    model.clip_grad_and_step(adapter_name="t0")


# neighbours


@pytest.mark.full
def test_what_happens_to_others_changes_no_bit(folder: Path) -> None:
    """t0 trains; others are added, removed, stepped, fail and are evaluated between its steps."""
    model, alone = adapters(folder, 2), adapters(folder, 1)
    for step in range(6):
        train(alone, ["t0"], step)
        if step == 1:
            model.add_adapter_to_model("t7", lora(5), seed=9)
            model.set_optimizer("Muon", lr=1e-2, adapter_name="t7")
        if step == 2:
            model.remove_adapter("t1")
        if step == 3:
            flat_of(model, "t7").data.fill_(float("nan"))
        others = [name for name in ("t1", "t7") if name in model.pool.tenants]
        rows = {name: make_rows(1, 9, seed=step + 100 * int(name[1:])) for name in ("t0", *others)}
        results = model.pool.run([Operation(name, "forward_backward", mine) for name, mine in rows.items()])
        model.forward_only(inputs=make_rows(2, (3, 20), seed=step), adapter_name=[None, others[0]])
        assert isinstance(results[0], OperationResult)
        assert isinstance(results[-1], OperationError) == (step >= 3)
        model.clip_grad_and_step(
            adapter_name=[
                "t0",
                *(n for n, r in zip(others, results[1:], strict=True) if isinstance(r, OperationResult)),
            ]
        )
    assert torch.equal(flat_of(model, "t0"), flat_of(alone, "t0")), torch.__version__
    moments = moments_of(alone, "t0")
    assert all(torch.equal(value, moments[key]) for key, value in moments_of(model, "t0").items())


@pytest.mark.full
def test_a_name_that_is_used_again_has_nothing_of_the_one_before(folder: Path) -> None:
    model, fresh = adapters(folder), adapters(folder)
    ref = model.pool.tenants["t1"].ref
    for step in range(2):
        train(model, ["t0", "t1"], step)
    model.forward_backward(inputs=make_rows(1, 9, 0), adapter_name="t1")
    model.remove_adapter("t1")
    with pytest.raises(ArgumentError, match="no adapter 't1'"):
        model.forward_only(inputs=make_rows(1, 9, 0), adapter_name="t1")
    model.add_adapter_to_model("t1", lora(3), seed=1)
    with pytest.raises(TrainingStateError, match=r"'t1' .* was removed"):
        model.pool.version(ref)
    [result] = model.pool.run([Operation(ref, "forward", make_rows(1, 9, 0))])
    assert isinstance(result, OperationError)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="t1")
    for step in range(2):
        train(model, ["t1"], step)
        train(fresh, ["t1"], step)
    assert torch.equal(flat_of(model, "t1"), flat_of(fresh, "t1"))
    assert model.optimizer_group["t1"].updates == 2


def test_first_weights_are_a_function_of_the_seed(folder: Path) -> None:
    one, other = open_pool(folder), open_pool(folder)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    one.add_adapter_to_model("a", config, seed=5)
    other.add_adapter_to_model("n", lora(3))
    other.add_adapter_to_model("b", config, seed=5)
    other.add_adapter_to_model("c", config, seed=6)
    other.add_adapter_to_model("d", {"r": 4, "target_modules": ["q_proj", "down_proj"], "seed": 5})
    assert torch.equal(flat_of(one, "a"), flat_of(other, "b"))
    assert torch.equal(flat_of(one, "a"), flat_of(other, "d"))
    assert not torch.equal(flat_of(one, "a"), flat_of(other, "c"))
    torch.manual_seed(3)
    other.add_adapter_to_model("e", config)
    torch.manual_seed(3)
    one.add_adapter_to_model("e", config)
    one.add_adapter_to_model("f", config)
    assert torch.equal(flat_of(one, "e"), flat_of(other, "e"))
    assert not torch.equal(flat_of(one, "e"), flat_of(one, "f"))
    for name, value in one.get_state_dict(adapter_name="a").items():
        if "lora_B" in name:
            assert not value.any()
        else:
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < float(value.abs().max()) <= bound


def test_the_configuration_that_was_given_is_not_changed_and_not_followed(folder: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear")
    model = open_pool(folder)
    model.add_adapter_to_model("a", config)
    assert config.target_modules == "all-linear"
    config.r = 9
    assert model.get_peft_config_dict("a")["r"] == 4


def test_defaults_of_the_model_hold_where_a_configuration_says_nothing(folder: Path) -> None:
    model = open_pool(folder, lora_config={"r": 5, "target_modules": ["q_proj"], "lora_alpha": 3})
    model.add_adapter_to_model("a", {"lora_alpha": 7})
    found = model.get_peft_config_dict("a")
    assert (found["r"], found["lora_alpha"], set(found["target_modules"])) == (5, 7, {"q_proj"})


# threads


@pytest.mark.full
def test_one_thread_evaluates_while_another_trains(folder: Path) -> None:
    model, alone = adapters(folder), adapters(folder)
    rows = make_rows(2, (9, 14), seed=4)
    expected = model.forward_only(inputs=rows, adapter_name=["t1", None])
    model.forward_backward(inputs=rows[:1], adapter_name="t2")
    stop, seen, errors = threading.Event(), [], []

    def evaluate() -> None:
        try:
            while not stop.is_set():
                seen.append(model.forward_only(inputs=rows, adapter_name=["t1", None]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(12):
        train(model, ["t0", "t2"], step)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(seen) > 2
    for outputs in seen:
        for mine, first in zip(outputs, expected, strict=True):
            assert torch.equal(mine["logps"], first["logps"])
    alone.forward_backward(inputs=rows[:1], adapter_name="t2")
    for step in range(12):
        train(alone, ["t0", "t2"], step)
    for name in ("t0", "t2"):
        assert torch.equal(flat_of(model, name), flat_of(alone, name))


@pytest.mark.full
def test_two_threads_train_two_adapters(folder: Path) -> None:
    model, alone = adapters(folder, 2), adapters(folder, 2)
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for step in range(12):
                train(model, [name], step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("t0", "t1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for name in ("t0", "t1"):
        for step in range(12):
            train(alone, [name], step)
        assert torch.equal(flat_of(model, name), flat_of(alone, name))


# the model beside its adapters


def test_the_model_itself_is_as_it_was(folder: Path) -> None:
    model = adapters(folder)
    plain = TransformersModel(model_id=str(folder), mixed_precision="no")
    row: Row = make_rows(1, 9, seed=2)[0]
    ids = torch.tensor([row["input_ids"]])
    model.forward_backward(inputs=[row, row], adapter_name=["t0", None])
    with torch.no_grad():
        assert torch.equal(model.model(input_ids=ids).logits, plain.model.eval()(input_ids=ids).logits)
        torch.testing.assert_close(
            model.model.generate(ids, max_new_tokens=4, do_sample=False),
            plain.model.generate(ids, max_new_tokens=4, do_sample=False),
        )


def test_adding_and_removing_leaves_no_memory_behind(folder: Path) -> None:
    import gc
    import weakref

    model = adapters(folder, 1)
    model.add_adapter_to_model("x", lora(4), seed=1)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="x")
    model.forward_backward(inputs=make_rows(2, 9, 0), adapter_name=["x", "t0"])
    model.clip_grad_and_step(adapter_name=["x", "t0"])
    model.forward(inputs=make_rows(2, 9, 0), adapter_name="x")
    gone = weakref.ref(flat_of(model, "x"))
    model.remove_adapter("x")
    gc.collect()
    assert gone() is None

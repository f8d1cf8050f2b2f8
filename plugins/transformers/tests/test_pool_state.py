"""Adapters of a pool go into snapshots and come out of them unchanged; those removed leave nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_states import OPTIMIZERS, ROWS, equal, everything, opened, train
from pools import flat_of, lora, open_pool
from safetensors.torch import load_file, save_file

from twinkle.errors import CheckpointError, TrainingStateError
from twinkle.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


# snapshots


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_a_snapshot_bit_for_bit(folder: Path, optimizer: str) -> None:
    model = opened(folder, optimizer=optimizer)
    train(model, "a", range(3))  # one step, and half of the next
    snapshot = model.pool.snapshot("a")
    train(model, "a", range(3, 7))
    there = everything(model, "a")
    model.pool.restore("a", snapshot)
    assert model.optimizer_group["a"].pending == 1
    train(model, "a", range(3, 7))
    assert equal(everything(model, "a"), there)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["one vector", "matrices", "factored"])
def test_a_snapshot_goes_through_files_into_an_adapter_of_another_pool(
    folder: Path, tmp_path: Path, optimizer: str
) -> None:
    model = opened(folder, optimizer=optimizer)
    train(model, "a", range(3))
    snapshot = model.pool.snapshot("a")
    save_file({name: t.contiguous() for name, t in snapshot["tensors"].items()}, tmp_path / "t.safetensors")
    read = {"tensors": load_file(tmp_path / "t.safetensors"), "state": json.loads(json.dumps(snapshot["state"]))}
    other = opened(folder, "x", "y", optimizer=optimizer)
    other.pool.restore("y", read)
    for pool, name in ((model, "a"), (other, "y")):
        train(pool, name, range(3, 7))
    assert equal(everything(model, "a"), everything(other, "y"))


@pytest.mark.parametrize("optimizer", ["one vector", "matrices"])
def test_a_snapshot_without_the_gradient_is_one_of_just_after_the_last_step(folder: Path, optimizer: str) -> None:
    model = opened(folder, optimizer=optimizer)
    train(model, "a", range(2))
    stepped = model.pool.snapshot("a")
    train(model, "a", range(2, 3))  # half of the next step
    without = model.pool.snapshot("a", gradient=False)
    assert without["tensors"].keys() == stepped["tensors"].keys()
    assert all(torch.equal(tensor, stepped["tensors"][name]) for name, tensor in without["tensors"].items())
    model.pool.restore("a", without)
    assert model.optimizer_group["a"].pending == 0
    assert flat_of(model, "a").grad is None


@pytest.mark.full
def test_a_snapshot_shares_no_memory_with_the_adapter(folder: Path) -> None:
    model = opened(folder)
    train(model, "a", range(3))
    snapshot = model.pool.snapshot("a")
    kept = {name: tensor.clone() for name, tensor in snapshot["tensors"].items()}
    train(model, "a", range(3, 6))
    model.pool.restore("a", snapshot)
    train(model, "a", range(3, 6))
    assert equal(snapshot["tensors"], kept)


def test_a_snapshot_from_before_the_optimizer_takes_it_away_again(folder: Path) -> None:
    model = open_pool(folder)
    model.add_adapter_to_model("a", lora(), seed=1)
    fresh = model.pool.snapshot("a")
    model.forward_backward(inputs=ROWS[0], adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    after = flat_of(model, "a").detach().clone()
    model.forward_backward(inputs=ROWS[0], adapter_name="a")
    model.pool.restore("a", fresh)
    group = model.optimizer_group["a"]
    assert (group.optimizer, group.cur_step, group.pending, flat_of(model, "a").grad) == (None, 0, 0, None)
    model.forward_backward(inputs=ROWS[0], adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    assert torch.equal(flat_of(model, "a"), after)


@pytest.mark.full
def test_a_restored_adapter_is_another_version_for_samplers(folder: Path) -> None:
    model = opened(folder)
    snapshot, first = model.pool.snapshot("a"), model.pool.version("a")
    train(model, "a", range(4))  # the rate of the first step is 0
    second = model.pool.version("a")
    model.pool.restore("a", snapshot)
    third = model.pool.version("a")
    assert len({first.key, second.key, third.key}) == 3
    assert torch.equal(first.flat, third.flat)
    assert not torch.equal(second.flat, third.flat)


def damaged(snapshot: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"tensors": dict(snapshot["tensors"]), "state": {**snapshot["state"], **changes}}


def test_what_does_not_fit_is_refused_with_a_reason_and_changes_nothing(folder: Path) -> None:
    model = opened(folder)
    model.add_adapter_to_model("rank", lora(2, lora_dropout=0.25))
    model.add_adapter_to_model("places", lora(4, lora_dropout=0.25, target_modules=["q_proj"]))
    model.add_adapter_to_model("dropout", lora(4))
    model.add_adapter_to_model("bare", lora(4, lora_dropout=0.25))
    model.add_adapter_to_model("other", lora(4, lora_dropout=0.25))
    model.set_optimizer("SGD", adapter_name="other")
    train(model, "a", range(3))
    snapshot = model.pool.snapshot("a")
    counters = snapshot["state"]["counters"]
    group = {**snapshot["state"]["optimizer"]["groups"][0], "params": ["nobody"]}
    short = damaged(snapshot)
    short["tensors"]["weights"] = short["tensors"]["weights"][:-1]
    foreign = damaged(snapshot)
    foreign["tensors"]["optimizer/exp_avg/nobody"] = torch.zeros(3)
    strange = damaged(snapshot)
    strange["tensors"]["bias"] = torch.zeros(3)
    lacking = damaged(snapshot)
    del lacking["tensors"]["weights"]
    odd = {"groups": [group], "class": "AdamW", "values": {}}
    for name, given, reason in [
        ("rank", snapshot, r"another adapter than 'rank': at .*q_proj its rank is 4, here 2"),
        ("places", snapshot, r"another adapter than 'places': the snapshot adapts .*k_proj, the adapter not"),
        ("dropout", snapshot, r"its dropout is 0.25, here 0.0"),
        ("bare", snapshot, r"AdamW, and adapter 'bare' has no optimizer; call set_optimizer\('AdamW'"),
        ("other", snapshot, r"contains the state of AdamW, the model has SGD"),
        ("b", short, r"weights is torch.float32 \[\d+\]; it should be"),
        ("b", lacking, r"weights is missing"),
        ("b", foreign, r"'exp_avg/nobody' of an optimizer"),
        ("b", strange, r"an unknown tensor 'bias'"),
        ("b", damaged(snapshot, version=9), r"version 9; this is 1"),
        ("b", damaged(snapshot, scheduler=None), r"no scheduler, the model has CosineWarmupScheduler"),
        ("b", damaged(snapshot, counters={**counters, "updates": None}), r"updates is None"),
        ("b", damaged(snapshot, counters={}), r"counters are incomplete"),
        ("b", damaged(snapshot, layout=[1]), r"not a list of shapes"),
        ("b", damaged(snapshot, optimizer=odd), r"for other parameters; adapter"),
        ("b", damaged(snapshot, optimizer={"class": "AdamW"}), r"does not fit: KeyError"),
        ("b", {"tensors": {}}, r"a dict of `tensors` and `state`"),
        ("b", {"tensors": {}, "state": {"version": 1}}, r"has no 'rank_multiple'"),
    ]:
        before = everything(model, "b")
        with pytest.raises(CheckpointError, match=reason):
            model.pool.restore(name, given)
        assert equal(everything(model, "b"), before)
    train(model, "b", range(2))  # and it still trains
    model.pool.restore("b", snapshot)
    assert equal(everything(model, "b")["weights"], snapshot["tensors"]["weights"])


# removal


def test_a_removed_adapter_leaves_no_memory_whoever_holds_on_to_it(folder: Path) -> None:
    model = opened(folder, optimizer="matrices")
    train(model, "a", range(3))
    tenant, used = model.pool.tenants["a"], model.pool.paging.used
    held = model.pool.bytes_of("a").device
    model.remove_adapter("a")
    assert model.pool.paging.used == used - held
    assert tenant.flat.grad is None
    tensors = [tenant.flat, *tenant.views().values()]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 0
    assert not tenant.group.optimizer.state
    with pytest.raises(TrainingStateError, match="'a' was removed"):
        model.pool.paging.use(tenant)


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_new_adapter_of_a_removed_name_is_as_fresh_as_the_first(folder: Path, place: Any) -> None:
    model, other = opened(folder), opened(folder)
    train(model, "a", range(3))
    old = model.pool.tenants["a"].ref
    model.pool.page("a", place)
    model.remove_adapter("a")
    model.add_adapter_to_model("a", lora(4, lora_dropout=0.25), seed=0, gradient_accumulation_steps=2)
    model.set_optimizer(adapter_name="a", **OPTIMIZERS["one vector"])
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=8, adapter_name="a")
    for pool in (model, other):
        train(pool, "a", range(3))
    assert equal(everything(model, "a"), everything(other, "a"))
    for call in (model.pool.remove, model.pool.snapshot, model.pool.version, model.pool.bytes_of, model.pool.usage):
        with pytest.raises(TrainingStateError, match="was removed"):
            call(old)


def test_a_staged_forward_of_a_replaced_adapter_is_refused(folder: Path) -> None:
    model = opened(folder)
    for remove in (model.remove_adapter, model.pool.remove):
        model.forward(inputs=ROWS[0], adapter_name="a")
        model.calculate_loss(adapter_name="a")
        remove("a")
        model.pool.add("a", lora(4), seed=3)
        with pytest.raises(TrainingStateError, match="there is no forward"):
            model.backward(adapter_name="a")
        assert flat_of(model, "a").grad is None


@pytest.mark.full
def test_a_staged_forward_survives_paging(folder: Path) -> None:
    model, other = opened(folder), opened(folder)
    for pool in (model, other):
        pool.forward(inputs=ROWS[0], adapter_name="a")
        pool.calculate_loss(adapter_name="a")
        if pool is model:
            pool.pool.page("a", "disk")
        pool.backward(adapter_name="a")
    assert equal(everything(model, "a"), everything(other, "a"))
    assert not math.isnan(float(flat_of(model, "a").grad.norm()))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["one vector", "matrices"])
def test_what_is_removed_leaves_zeros_in_memory(folder: Path, optimizer: str) -> None:
    model = opened(folder, optimizer=optimizer)
    train(model, "a", range(3))
    flat = flat_of(model, "a")
    state = [value for part in model.optimizer_group["a"].optimizer.state.values() for value in part.values()]
    held = [flat.detach(), flat.grad, *(value for value in state if isinstance(value, torch.Tensor))]
    assert all(bool(tensor.count_nonzero()) for tensor in held)
    model.remove_adapter("a")
    assert not any(bool(tensor.count_nonzero()) for tensor in held)


def test_what_is_removed_while_it_is_paged_leaves_zeros_and_no_file(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    train(model, "a", range(3))
    model.pool.page("a", "host")
    held = list(model.pool.paging._host[model.pool.tenants.find("a")]._host.values())
    assert any(bool(tensor.count_nonzero()) for tensor in held)
    model.pool.page("b", "disk", tmp_path)
    for name in "ab":
        model.remove_adapter(name)
    assert not any(bool(tensor.count_nonzero()) for tensor in held)
    assert not list(tmp_path.iterdir())

"""Checkpoints and snapshots of the torch backend: what comes back is what was saved, to the bit."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from server_pool import Bench, datum
from server_reference import Reference

from twinkle.testing import tiny_model
from twinkle_server.engine.errors import UserError
from twinkle_server.operations import Create, Load, Save
from twinkle_transformers.lowrank.layout import Layout
from twinkle_transformers.pool import config as pool_config


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def trained(bench):
    bench.create("a", rank=4, seed=2)
    for turn in range(3):
        bench.run("a", [datum(9, turn)])
        bench.step("a", learning_rate=1e-2)
    return bench


def go_on(bench, queue_id):
    """Train two steps more and return the weights."""
    for turn in (7, 8):
        bench.run(queue_id, [datum(11, turn)])
        bench.step(queue_id, learning_rate=1e-2, weight_decay=0.1)
    return bench.weights(queue_id)


@pytest.mark.full
def test_a_model_from_a_checkpoint_with_its_optimizer_goes_on_as_if_nothing_had_happened(trained, fresh):
    folder = trained.save("a", "weights")
    trained.executor.create("b", Create(4, 99, source="x", optimizer=True), folder)
    other = fresh()
    other.executor.create("c", Create(4, 98, source="x", optimizer=True), folder)
    expected = go_on(trained, "a")
    assert same(go_on(trained, "b"), expected)
    assert same(go_on(other, "c"), expected)


@pytest.mark.full
def test_without_the_optimizer_the_weights_are_equal_and_the_moments_fresh(trained):
    folder = trained.save("a", "weights")
    trained.executor.create("b", Create(4, 99, source="x"), folder)
    assert same(trained.weights("a"), trained.weights("b"))
    other = Reference(trained.base, trained.save("b"))
    tokens, inputs = datum(9, 5)
    trained.run("b", [(tokens, inputs)])
    trained.step("b", eps=1e-4)
    (-torch.as_tensor(inputs["weights"]) * other.logps(tokens, inputs["target_tokens"])).sum().backward()
    other.step({"eps": 1e-4})
    for name, value in trained.weights("b").items():
        theirs = other.trained[name.replace(".weight", ".default.weight")]
        torch.testing.assert_close(value, theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [True, False])
def test_loading_into_a_model_drops_what_it_had(trained, optimizer):
    trained.run("a", [datum(9, 30)])
    folder = trained.save("a", "weights")
    expected = trained.weights("a")
    go_on(trained, "a")
    trained.run("a", [datum(9, 31)])
    trained.executor.load("a", Load("x", "tinker://x", optimizer), folder)
    assert same(trained.weights("a"), expected)
    assert trained.step("a", learning_rate=0.0) == {"grad_norm": 0.0}


def test_a_checkpoint_is_safetensors_and_json_alone(trained):
    for kind in ("weights", "sampler_weights", "external_weights"):
        folder = trained.save("a", kind)
        assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
        for path in folder.glob("*.safetensors"):
            assert load_file(path)
        for path in folder.glob("*.json"):
            assert isinstance(json.loads(path.read_text()), dict)


def test_what_a_row_says_of_a_checkpoint(trained):
    _, said = trained.executor.save("a", Save("one", "weights"))
    assert said == {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": True}


@pytest.mark.sample(2)
@pytest.mark.parametrize("switches", [{}, {"train_unembed": False}, {"train_mlp": False, "train_attn": False}])
def test_external_weights_load_in_peft_and_give_the_same_logprobs(bench, switches):
    bench.create("a", rank=8, **switches)
    bench.shake("a")
    tokens, inputs = datum(15, 3)
    [found], _ = bench.run("a", [(tokens, inputs)], forward=True)
    other = Reference(bench.base, bench.save("a"))
    assert found == pytest.approx(other.logps(tokens, inputs["target_tokens"]).detach().numpy(), abs=1e-4)


def test_external_weights_of_a_model_whose_head_is_its_embedding(tmp_path):
    base = tiny_model(tmp_path / "tied", "qwen3", initializer_range=0.1, tie_word_embeddings=True)
    bench = Bench(base, tmp_path)
    bench.create("a", rank=8)
    bench.shake("a")
    tokens, inputs = datum(15, 3)
    [found], _ = bench.run("a", [(tokens, inputs)], forward=True)
    folder = bench.save("a")
    other = Reference(base, folder)
    assert found == pytest.approx(other.logps(tokens, inputs["target_tokens"]).detach().numpy(), abs=1e-4)
    _, prompt = bench.sample(tokens, folder, max_tokens=1, prompt_logprobs=True)
    assert prompt.logprobs[1:] == pytest.approx(other.scores(tokens).numpy(), abs=1e-4)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"


def test_weights_without_an_optimizer_may_begin_a_model_but_not_with_one(trained):
    folder = trained.save("a", "sampler_weights")
    trained.executor.create("b", Create(4, 3, source="x"), folder)
    assert same(trained.weights("a"), trained.weights("b"))
    with pytest.raises(UserError, match="without the optimizer"):
        trained.executor.create("c", Create(4, 3, source="x", optimizer=True), folder)
    with pytest.raises(UserError, match="model 'c' does not exist"):
        trained.run("c", [datum(3, 1)])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_a_checkpoint_of_another_shape_changes_nothing(trained, kind):
    trained.create("b", rank=8, seed=2)
    folder = trained.save("b", kind)
    before = trained.weights("a")
    with pytest.raises(UserError, match=r"rank|does not fit"):
        trained.executor.load("a", Load("x", "tinker://x"), folder)
    assert same(trained.weights("a"), before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("broken", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("how", ["gone", "cut", "noise"])
def test_damaged_files_are_an_error_and_leave_nothing(trained, broken, how):
    folder = trained.save("a", "weights")
    path = folder / broken
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else b"\x80\x04\x95 not one of ours")
    with pytest.raises(UserError) as caught:
        trained.executor.create("b", Create(4, 1, source="x"), folder)
    assert str(trained.data) not in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        trained.run("b", [datum(3, 1)])


@pytest.mark.full
def test_a_snapshot_brings_back_everything_pending_gradients_included(trained, fresh):
    trained.run("a", [datum(9, 30)])
    folder = trained.snapshot("a")
    trained.run("a", [datum(9, 31)])
    norm = trained.step("a", learning_rate=1e-2)
    expected = go_on(trained, "a")
    other = fresh()
    other.executor.restore("a", folder)
    other.run("a", [datum(9, 31)])
    assert other.step("a", learning_rate=1e-2) == norm
    assert same(go_on(other, "a"), expected)


def test_a_snapshot_is_a_copy_that_later_training_does_not_change(trained):
    expected = trained.weights("a")
    taken = trained.executor.snapshot("a")
    go_on(trained, "a")
    folder = trained.data / "late"
    folder.mkdir()
    taken.write(folder)
    trained.executor.restore("a", folder)
    assert same(trained.weights("a"), expected)


def test_a_restored_snapshot_takes_the_place_of_the_model(trained, tmp_path):
    folder = trained.snapshot("a")
    shutil.copy(folder / "state.json", tmp_path / "manifest.json")
    expected = go_on(trained, "a")
    trained.executor.restore("a", folder)
    assert same(go_on(trained, "a"), expected)


@pytest.mark.full
def test_a_fresh_model_snapshots_before_its_first_step(bench, fresh):
    bench.create("a", seed=4)
    other = fresh()
    other.executor.restore("a", bench.snapshot("a"))
    assert same(go_on(bench, "a"), go_on(other, "a"))


@pytest.mark.full
def test_a_state_fits_a_pool_that_lays_matrices_out_otherwise(trained, fresh, monkeypatch):
    """As on a GPU: ranks rounded up to a multiple of 8, and the places in another order."""
    trained.run("a", [datum(9, 30)])
    folder = trained.snapshot("a")
    norm = trained.step("a")
    other = fresh()
    real = Layout.of
    with monkeypatch.context() as patch:
        laid = lambda shapes, rank_multiple=1: real(sorted(shapes, reverse=True), rank_multiple=8)  # noqa: E731
        patch.setattr(pool_config.Layout, "of", staticmethod(laid))
        other.create("a", rank=4)
    monkeypatch.setattr(other.executor._models, "_add", lambda queue_id, spec: other.executor._models[queue_id])
    monkeypatch.setattr(other.executor._models, "remove", lambda queue_id: None)
    other.executor.restore("a", folder)
    assert other.step("a")["grad_norm"] == pytest.approx(norm["grad_norm"], rel=1e-6)
    mine, theirs = trained.weights("a"), other.weights("a")
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-9)


def test_a_model_that_is_removed_leaves_zeros_and_its_name_is_free(trained):
    trained.run("a", [datum(9, 1)])
    tenant = trained.tenant("a")
    state = next(iter(tenant.group.optimizer.state.values()))
    held = [tenant.flat.detach(), tenant.flat.grad, state["exp_avg"], state["exp_avg_sq"]]
    assert all(bool(tensor.count_nonzero()) for tensor in held)
    trained.executor.remove("a")
    assert not any(bool(tensor.count_nonzero()) for tensor in held)
    trained.executor.remove("a")
    with pytest.raises(UserError, match="model 'a' does not exist"):
        trained.step("a")
    trained.create("a", seed=2)
    alone, _ = trained.run("a", [datum(9, 1)], forward=True)
    base = Reference(trained.base).logps(datum(9, 1)[0], datum(9, 1)[1]["target_tokens"])
    assert alone[0] == pytest.approx(base.detach().numpy(), abs=1e-5)


@pytest.mark.full
def test_models_that_are_paged_out_come_back_as_they_were(base, tmp_path, fresh):
    room = fresh()
    small = fresh(extra={"model": {"adapter_memory": 400_000, "host_memory": 300_000}})
    for bench in (room, small):
        for queue_id in "abcdef":
            bench.create(queue_id, seed=ord(queue_id))
        for turn in range(2):
            for queue_id in "abcdef":
                bench.run(queue_id, [datum(5, turn)])
            for queue_id in "abcdef":
                bench.step(queue_id, learning_rate=1e-2)
    folders = [bench.snapshot("a") for bench in (room, small)]
    one, other = (load_file(folder / "state.safetensors") for folder in folders)
    assert same(one, other)
    for queue_id in "abcdef":
        assert same(room.weights(queue_id), small.weights(queue_id))
        small.executor.remove(queue_id)


def test_arrays_of_a_message_may_be_read_only(bench):
    bench.create("a")
    tokens, inputs = datum(4, 1)
    inputs = {name: np.frombuffer(value.tobytes(), value.dtype) for name, value in inputs.items()}
    bench.run("a", [(tokens, inputs)])

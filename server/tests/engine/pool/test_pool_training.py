"""Passes and updates of the torch backend against PEFT and torch alone, in float32."""

import numpy as np
import pytest
import torch
from server_pool import VOCABULARY, Bench, answer, datum, drawn, request
from server_reference import ADAM, Reference, loss

from twinkle_server.engine.errors import UserError
from twinkle_server.engine.executor import Pass
from twinkle_server.operations import OptimStep

CLIPS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
    "dro": {"beta": 0.3},
}


def rows_of(name, seed=0, lengths=(7, 12, 9)):
    if name == "cross_entropy":
        return [datum(length, seed + at) for at, length in enumerate(lengths)]
    mask = {"sequence_ratio_mask": (lambda n: np.arange(n) % 3 != 0)}
    made = [drawn(length, seed + at) for at, length in enumerate(lengths)]
    if name == "gspo":
        for tokens, inputs in made:
            inputs["sequence_ratio_mask"] = mask["sequence_ratio_mask"](len(tokens)).astype(np.float32)
    return made


def reference(bench, queue_id):
    return Reference(bench.base, bench.save(queue_id))


def compare(bench, queue_id, other):
    """Compare all weights of a model with those of a PEFT model."""
    mine = bench.weights(queue_id)
    theirs = {name.replace(".default", ""): value.detach() for name, value in other.trained.items()}
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.full
def test_a_fresh_model_is_the_base_model_and_follows_from_its_seed(bench):
    bench.create("a", seed=5)
    bench.create("b", seed=5)
    bench.create("c", seed=6)
    row = datum(11, 1)
    logprobs = [bench.run(queue_id, [row], forward=True)[0][0] for queue_id in "abc"]
    base = Reference(bench.base).logps(row[0], row[1]["target_tokens"]).detach().numpy()
    for found in logprobs:
        assert found == pytest.approx(base, abs=1e-5)
    a, b, c = (bench.weights(queue_id) for queue_id in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


@pytest.mark.sample(2)
@pytest.mark.parametrize("switch", ["train_attn", "train_mlp", "train_unembed"])
def test_what_is_switched_off_has_no_parameters(bench, switch):
    parts = {"train_attn": "self_attn", "train_mlp": ".mlp.", "train_unembed": "lm_head"}
    bench.create("all")
    bench.create("some", **{switch: False})
    assert any(parts[switch] in name for name in bench.weights("all"))
    assert not any(parts[switch] in name for name in bench.weights("some"))


def test_nothing_to_train_is_the_clients_error(bench):
    with pytest.raises(UserError, match="at least one of train_attn"):
        bench.create("a", train_attn=False, train_mlp=False, train_unembed=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_the_scale_is_32_over_the_rank(bench, rank):
    bench.create("a", rank=rank)
    config = bench.save("a").joinpath("adapter_config.json").read_text()
    assert '"lora_alpha": 32' in config
    assert f'"r": {rank}' in config


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_losses_and_three_updates_are_those_of_peft_and_torch(bench, name):
    bench.create("a")
    bench.shake("a")
    other = reference(bench, "a")
    other.optimizer = None
    bench.executor._models._reset_optimizer(bench.executor._models["a"])
    adam = {**ADAM, "learning_rate": 3e-3, "weight_decay": 0.1}
    for turn in range(3):
        data = rows_of(name, seed=10 * turn)
        config = CLIPS.get(name, {})
        logprobs, metrics = bench.run("a", data, name, **config)
        total = torch.zeros(())
        for (tokens, inputs), mine in zip(data, logprobs, strict=True):
            logps = other.logps(tokens, inputs["target_tokens"])
            assert mine == pytest.approx(logps.detach().numpy(), abs=2e-4)
            total = total + loss(name, logps, inputs, config)
        assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-3, abs=1e-3)
        total.backward()
        norm = bench.step("a", **adam)["grad_norm"]
        assert norm == pytest.approx(other.step(adam), rel=1e-3)
    compare(bench, "a", other)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bound", [0.0, 0.5, 1e6])
def test_the_summed_gradient_is_clipped_by_its_norm(bench, bound):
    bench.create("a")
    bench.shake("a")
    other = reference(bench, "a")
    bench.executor._models._reset_optimizer(bench.executor._models["a"])
    adam = {**ADAM, "learning_rate": 1e-2, "grad_clip_norm": bound, "eps": 1e-3}
    for seed in (1, 2):
        bench.run("a", [datum(8, seed)])
        tokens, inputs = datum(8, seed)
        loss("cross_entropy", other.logps(tokens, inputs["target_tokens"]), inputs, {}).backward()
    assert bench.step("a", **adam)["grad_norm"] == pytest.approx(other.step(adam), rel=1e-4)
    compare(bench, "a", other)


@pytest.mark.full
def test_one_request_of_two_rows_is_two_requests_of_one(bench):
    for queue_id in "ab":
        bench.create(queue_id)
        bench.shake(queue_id)
    bench.run("a", [datum(8, 1), datum(8, 2)])
    bench.run("b", [datum(8, 1)])
    bench.run("b", [datum(8, 2)])
    for queue_id in "ab":
        bench.step(queue_id, learning_rate=1e-2)
    a, b = bench.weights("a"), bench.weights("b")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_forward_between_leaves_the_update_as_it_is_bit_for_bit(bench):
    for queue_id in "ab":
        bench.create(queue_id)
        bench.shake(queue_id)
    bench.run("a", [datum(8, 1)])
    bench.run("b", [datum(8, 1)])
    bench.run("b", [datum(12, 2)], forward=True)
    for queue_id in "ab":
        bench.step(queue_id)
    assert all(torch.equal(mine, bench.weights("b")[name]) for name, mine in bench.weights("a").items())


@pytest.mark.full
def test_operations_of_two_models_in_one_pass_are_each_alone(bench, fresh):
    alone = fresh()
    for at, queue_id in enumerate("ab"):
        for where in (bench, alone):
            where.create(queue_id, rank=4 * (at + 1), seed=at)
            where.shake(queue_id, seed=at)
    for turn in range(3):
        data = {"a": [datum(9, turn)], "b": rows_of("ppo", seed=turn)}
        names = {"a": "cross_entropy", "b": "ppo"}
        passes = [Pass(queue_id, request(data[queue_id], names[queue_id]), turn) for queue_id in "ab"]
        together, cost = bench.executor.run(passes)
        for queue_id, found in zip("ab", together, strict=True):
            logprobs, metrics = answer(found)
            mine, said = alone.run(queue_id, data[queue_id], names[queue_id])
            for one, other in zip(logprobs, mine, strict=True):
                assert one == pytest.approx(other, abs=1e-5)
            assert metrics["loss:sum"] == pytest.approx(said["loss:sum"], rel=1e-5)
        assert cost.tokens == 9 + 7 + 12 + 9
        assert cost.flops > 0
        bench.executor.step([("a", OptimStep()), ("b", OptimStep(learning_rate=1e-3))])
        alone.step("a")
        alone.step("b", learning_rate=1e-3)
    for queue_id in "ab":
        mine, theirs = bench.weights(queue_id), alone.weights(queue_id)
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-7)


def test_several_operations_of_one_model_in_one_call_run_in_their_order(bench):
    bench.create("a")
    bench.create("b")
    data = [datum(8, 1)]
    passes = [Pass("a", request(data), 1), Pass("a", request(data, forward=True), 2), Pass("a", request(data), 3)]
    together, _ = bench.executor.run(passes)
    assert len({answer(found)[1]["loss:sum"] for found in together}) == 1
    bench.run("b", data)
    bench.run("b", data)
    assert bench.step("a")["grad_norm"] == pytest.approx(bench.step("b")["grad_norm"], rel=1e-6)


@pytest.mark.full
def test_a_step_without_gradients_moves_by_momentum_and_decay_as_in_torch(bench):
    bench.create("a")
    bench.shake("a")
    other = reference(bench, "a")
    bench.executor._models._reset_optimizer(bench.executor._models["a"])
    adam = {**ADAM, "learning_rate": 1e-2, "weight_decay": 0.2}
    bench.run("a", [datum(8, 1)])
    tokens, inputs = datum(8, 1)
    loss("cross_entropy", other.logps(tokens, inputs["target_tokens"]), inputs, {}).backward()
    bench.step("a", **adam)
    other.step(adam)
    for value in other.trained.values():
        value.grad = torch.zeros_like(value)
    assert bench.step("a", **adam) == {"grad_norm": 0.0}
    other.step(adam)
    compare(bench, "a", other)


def test_a_first_step_without_gradients_only_decays(bench):
    bench.create("a")
    before = bench.weights("a")
    bench.step("a", learning_rate=0.1, weight_decay=0.5)
    for name, value in bench.weights("a").items():
        torch.testing.assert_close(value, before[name] * 0.95)


@pytest.mark.full
def test_several_targets_a_position_are_scored_and_trained_dense_or_sparse(bench):
    from twinkle_server.wire.codec import Sparse

    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, 6).tolist()
    targets = np.stack([draw.choice(256, 3, replace=False) for _ in range(6)])
    weights = draw.random((6, 3)).astype(np.float32)
    dense = (tokens, {"target_tokens": targets, "weights": weights})
    wide = (tokens[:4], {"target_tokens": targets[:4, :2], "weights": weights[:4, :2]})
    flat = (tokens[:5], {"target_tokens": targets[:5, 0], "weights": weights[:5, 0]})
    bench.create("a")
    bench.create("b")
    for queue_id in "ab":
        bench.shake(queue_id)
    other = reference(bench, "a")
    found, metrics = bench.run("a", [dense, wide, flat])
    for (ids, inputs), mine in zip((dense, wide, flat), found, strict=True):
        assert mine.shape == inputs["target_tokens"].shape
        assert mine == pytest.approx(other.logps(ids, inputs["target_tokens"]).detach().numpy(), abs=2e-4)
    total = sum(loss("cross_entropy", other.logps(d[0], d[1]["target_tokens"]), d[1], {}) for d in (dense, wide, flat))
    assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
    rows, columns = np.arange(0, 19, 3), np.tile(np.arange(3), 6)
    sparse = {
        "target_tokens": Sparse(targets.reshape(-1), rows, columns, (6, 3)),
        "weights": Sparse(weights.reshape(-1), rows, columns, (6, 3)),
    }
    again, said = bench.run("b", [(tokens, sparse), wide, flat])
    assert all((one == two).all() for one, two in zip(found, again, strict=True))
    assert said == metrics
    assert bench.step("a") == bench.step("b")


def test_positions_of_weight_zero_are_scored_too(bench):
    bench.create("a")
    tokens, inputs = datum(9, 1)
    [found], metrics = bench.run("a", [(tokens, {**inputs, "weights": np.zeros(9, np.float32)})])
    assert (found < -1).all()
    assert metrics["loss:sum"] == 0


def test_weight_zero_is_no_target_for_a_loss_that_knows_labels_alone(bench):
    for queue_id in "ab":
        bench.create(queue_id)
    tokens, inputs = datum(9, 1)
    kept = np.arange(9) % 3 > 0
    masked = {**inputs, "weights": kept.astype(np.float32)}
    [found], metrics = bench.run("a", [(tokens, masked)], "ChunkedCrossEntropyLoss")
    [plain], said = bench.run("b", [(tokens, masked)])
    assert found[kept] == pytest.approx(plain[kept])
    assert not found[~kept].any()
    assert metrics["loss:sum"] == pytest.approx(said["loss:sum"], rel=1e-5)
    assert bench.step("a")["grad_norm"] == pytest.approx(bench.step("b")["grad_norm"], rel=1e-5)


def test_without_weights_every_target_counts_once(bench):
    bench.create("a")
    tokens, inputs = datum(9, 1)
    [found], metrics = bench.run("a", [(tokens, {"target_tokens": inputs["target_tokens"]})])
    assert metrics["loss:sum"] == pytest.approx(-found.sum(), rel=1e-6)


@pytest.mark.full
def test_custom_losses_of_the_sdk_are_cross_entropy_with_weights_of_either_sign(bench):
    """C = sum lp^2, so that the weights are -dC/dlp = -2 lp."""
    bench.create("a")
    bench.shake("a")
    other = reference(bench, "a")
    bench.executor._models._reset_optimizer(bench.executor._models["a"])
    tokens, inputs = datum(9, 1)
    [logprobs], _ = bench.run("a", [(tokens, inputs)], forward=True)
    bench.run("a", [(tokens, {**inputs, "weights": -2 * logprobs})])
    (other.logps(tokens, inputs["target_tokens"]) ** 2).sum().backward()
    assert bench.step("a", eps=1e-3)["grad_norm"] == pytest.approx(other.step({"eps": 1e-3}), rel=1e-3)
    compare(bench, "a", other)


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", ["GRPOLoss", "DRGRPOLoss", "CISPOLoss"])
def test_metrics_are_sums_by_their_names(bench, loss):
    bench.create("a")
    tokens, inputs = drawn(9, 1)
    options = {"max_completion_length": 9.0} if loss == "DRGRPOLoss" else {}
    weighted = {**inputs, "rollout_logps": inputs["logprobs"]}
    _, metrics = bench.run("a", [(tokens, weighted)], loss, tis_cap=2.0, **options)
    assert {"loss:sum", "clip_ratio:sum", "approx_kl:sum", "rollout_kl:sum"} <= metrics.keys()
    assert all(name.count(":") == 1 for name in metrics)


def test_what_the_base_is_made_of_is_said(bench):
    info = bench.executor.describe()
    assert (info.context, info.vocabulary, info.architecture) == (512, VOCABULARY, "Qwen3ForCausalLM")
    assert info.losses[:6] == ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
    assert "GRPOLoss" in info.losses
    assert info.tokenizer == str(bench.base)
    assert isinstance(bench, Bench)

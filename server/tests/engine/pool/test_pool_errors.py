"""What is wrong with an operation is said with its key and numbers, and harms nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_pool import VOCABULARY, answer, datum, drawn, request

from twinkle import registry
from twinkle.data_format import LossOutput
from twinkle.errors import CapacityError, EngineFault
from twinkle.loss import Loss
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.executor import Pass
from twinkle_server.engine.losses.catalog import OWN, PUBLISHED, Losses
from twinkle_server.operations import Create, OptimStep
from twinkle_server.wire import tinker_pb2 as pb


def broken(tokens=None, **changes):
    """Return a row with something else in place of some of its inputs; None takes one away."""
    ids, inputs = datum(6, 1)
    inputs = {name: value for name, value in {**inputs, **changes}.items() if value is not None}
    return (ids if tokens is None else tokens), inputs


def weights(value):
    return np.array([1, 1, value, 1, 1, 1], np.float32)


BAD = {
    "no rows": ([], "cross_entropy", {}, "at least one datum"),
    "empty": ([broken(tokens=[])], "cross_entropy", {}, "datum 0: model_input must have at least one"),
    "too long": ([datum(513, 1)], "cross_entropy", {}, "at most 512 tokens.*513"),
    "token": ([broken(tokens=[1, 2, VOCABULARY, 4, 5, 6])], "cross_entropy", {}, f"model_input.*got {VOCABULARY}"),
    "negative": ([broken(tokens=[1, 2, -3, 4, 5, 6])], "cross_entropy", {}, "got -3"),
    "target": (
        [broken(target_tokens=np.full(6, VOCABULARY))],
        "cross_entropy",
        {},
        "tokens of datum 0: target_tokens must be",
    ),
    "no target": ([broken(target_tokens=None)], "cross_entropy", {}, "'target_tokens' is required"),
    "float target": (
        [broken(target_tokens=np.ones(6, np.float32))],
        "cross_entropy",
        {},
        "target_tokens must contain integers",
    ),
    "short target": (
        [broken(target_tokens=np.ones(5, np.int64))],
        "cross_entropy",
        {},
        r"target_tokens must have.*6.*\[5\]",
    ),
    "deep target": (
        [broken(target_tokens=np.ones((6, 1, 1), np.int64))],
        "cross_entropy",
        {},
        "target_tokens must have",
    ),
    "wide target": ([broken(target_tokens=np.ones((6, 2000), np.int64))], "cross_entropy", {}, "got 2000"),
    "short weights": (
        [broken(weights=np.ones(5, np.float32))],
        "cross_entropy",
        {},
        r"weights must have the shape .*\[5\]",
    ),
    "wide weights": (
        [broken(weights=np.ones((6, 2), np.float32))],
        "cross_entropy",
        {},
        r"weights must have the shape .*\[6, 2",
    ),
    "nan": ([broken(weights=weights(np.nan))], "cross_entropy", {}, "weights must be finite, got nan at 2"),
    "inf": ([broken(weights=weights(np.inf))], "cross_entropy", {}, "weights must be finite, got inf at 2"),
    "huge": ([broken(weights=weights(3e38)), broken(weights=weights(3e38))], "cross_entropy", {}, "inf|finite|nan"),
    "uneven": (
        [drawn(6, 1), drawn(6, 1, clip_low_threshold=weights(1))],
        "ppo",
        {},
        "datum 1: some datums have.*'clip_low_threshold'",
    ),
    "unknown input": (
        [broken(reward=weights(1))],
        "cross_entropy",
        {},
        "does not take the loss_fn_input 'reward'.*weights",
    ),
    "no logprobs": ([broken(weights=None, advantages=weights(1))], "ppo", {}, "'logprobs'.*missing"),
    "no advantages": ([broken(weights=None, logprobs=weights(1))], "ppo", {}, "advantages.*missing"),
    "short advantages": (
        [drawn(6, 1, advantages=np.ones(5, np.float32))],
        "ppo",
        {},
        r"advantages must have the shape .*\[5\]",
    ),
    "wide logprobs": (
        [drawn(6, 1, logprobs=np.ones((6, 2), np.float32))],
        "ppo",
        {},
        r"logprobs must have the shape .*\[6, 2",
    ),
    "no mask": ([drawn(6, 1)], "gspo", {}, "sequence_ratio_mask"),
    "unknown loss": ([broken()], "cross_entrpy", {}, "unknown loss_fn 'cross_entrpy'; did you mean 'cross_entropy'"),
    "no loss": ([broken()], "", {}, "available: cross_entropy, importance_sampling"),
    "no provenance": ([drawn(6, 1)], "stable_reinforce", {"kl_coeff": 0.1}, "datum 0: provenance spans are missing"),
    "own sequences": (
        [drawn(6, 1, sampled_sequence=np.ones(6, np.int64))],
        "stable_reinforce",
        {},
        "cannot use the loss_fn_input 'sampled_sequence'",
    ),
    "regression": ([broken()], "MSELoss", {}, "unknown loss_fn 'MSELoss'"),
    "unknown option": ([drawn(6, 1)], "ppo", {"clip_low": 0.8}, "clip_low"),
    "option of none": ([broken()], "cross_entropy", {"beta": 0.8}, "beta"),
    "text option": ([drawn(6, 1)], "ppo", {"clip_low_threshold": "low"}, "clip_low_threshold"),
    "odd option": ([drawn(6, 1)], "ppo", {"clip_low_threshold": float("nan")}, "clip_low_threshold"),
    "code": ([broken()], "os:system", {}, "unknown loss_fn 'os:system'"),
    "of vectors": ([broken()], "InfonceLoss", {}, "'InfonceLoss' compares vectors of texts.*task='embedding'"),
    "two of one": ([broken(target_tokens=np.ones((6, 2), np.int64), weights=None)], "CrossEntropyLoss", {}, "label"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_operation_fails_alone_with_words(shared, name):
    rows, loss, config, words = BAD[name]
    good = [datum(6, 2)]
    passes = [Pass("a", request(good), 1), Pass("a", request(rows, loss, **config), 2), Pass("b", request(good), 3)]
    with np.errstate(all="ignore"):
        found, _ = shared.executor.run(passes)
    with pytest.raises(UserError, match=words) as caught:
        answer(found[1])
    assert "model-" not in str(caught.value)
    assert answer(found[0])[1] == answer(found[2])[1]
    assert shared.step("a", learning_rate=0.0) == shared.step("b", learning_rate=0.0)


def test_chunks_that_are_no_text_are_refused(shared):
    for chunk in (pb.Chunk(image=pb.ImageChunk(data=b"x", format="png")), pb.Chunk(dmel=pb.DmelChunk(dmel=b"x"))):
        made = pb.ForwardBackwardRequest.FromString(request([datum(6, 1)]))
        made.data[0].model_input.append(chunk)
        [found], _ = shared.executor.run([Pass("a", made.SerializeToString(), 1)])
        with pytest.raises(UserError, match=r"datum 0: .*must be text"):
            answer(found)


def test_sparse_arrays_that_would_be_huge_are_refused_before_they_are_written_out(shared):
    made = pb.ForwardBackwardRequest.FromString(request([datum(6, 1)]))
    tensor = made.data[0].loss_fn_inputs["target_tokens"]
    tensor.Clear()
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([6, 10_000_000])
    tensor.sparse_csr.crow_indices = np.zeros(7, np.int64).tobytes()
    [found], _ = shared.executor.run([Pass("a", made.SerializeToString(), 1)])
    with pytest.raises(UserError, match="at most 6144 cells"):
        answer(found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_bytes_come_the_answer_is_a_result_or_the_clients_error(shared, data):
    kind = data.draw(st.sampled_from(["cross_entropy", "ppo", "gspo", "CrossEntropyLoss"]))
    rows = [datum(6, 1)] if "ross" in kind else [drawn(6, 1)]
    payload = bytearray(request(rows, kind, forward=True))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with np.errstate(all="ignore"):
        [found], _ = shared.executor.run([Pass("a", bytes(payload), 1)])
    assert isinstance(found, bytes | UserError), found
    shared.step("a", learning_rate=0.0)  # the bytes may have asked for gradients


def test_bytes_that_are_no_message_are_refused(shared):
    [found], _ = shared.executor.run([Pass("a", b"\xff\xff\xff", 1)])
    with pytest.raises(UserError, match="3 bytes"):
        answer(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be .* got -1"),
        ({"learning_rate": float("nan")}, "learning_rate must be .* got nan"),
        ({"beta1": 1.0}, r"beta1 must be a number in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": float("inf")}, "eps must be .* got inf"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"grad_clip_norm": float("nan")}, "grad_clip_norm must be .* got nan"),
        ({"learning_rate": "1e-3"}, "learning_rate must be .* got '1e-3'"),
    ],
)
def test_a_bad_step_changes_nothing_and_leaves_the_others(shared, values, words):
    for queue_id in "ab":
        shared.run(queue_id, [datum(6, 2)])
    before = shared.weights("a")
    bad, good = shared.executor.step([("a", OptimStep(**values)), ("b", OptimStep(learning_rate=0.0))])
    assert isinstance(bad, UserError)
    with pytest.raises(UserError, match=words):
        raise bad
    assert all(torch.equal(value, before[name]) for name, value in shared.weights("a").items())
    assert shared.step("a", learning_rate=0.0) == good


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were(shared):
    before = shared.weights("a")
    for size in (3e38, 1e30):
        with pytest.raises(UserError, match=r"(inf|nan); .*weights are unchanged"):
            shared.run("a", [broken(weights=np.full(6, size, np.float32))])
    assert shared.step("a", learning_rate=0.0) == {"grad_norm": 0.0}
    assert all(torch.equal(value, before[name]) for name, value in shared.weights("a").items())


def test_gradients_whose_sum_is_not_finite_are_dropped_and_the_weights_stay(shared):
    tenant = shared.tenant("a")
    before = shared.weights("a")
    shared.run("a", [datum(6, 2)])
    tenant.flat.grad[0] = float("inf")
    assert shared.step("a") == {"skipped": 1.0}
    assert all(torch.equal(value, before[name]) for name, value in shared.weights("a").items())
    assert shared.step("a", learning_rate=0.0) == {"grad_norm": 0.0}


@pytest.mark.parametrize("rank", [0, -1, 2.5, True])
def test_a_rank_that_is_none_is_refused(shared, rank):
    with pytest.raises(UserError, match="rank"):
        shared.executor.create("c", Create(rank, 1), None)


def test_a_queue_is_created_once(shared):
    with pytest.raises(UserError, match="already"):
        shared.create("a")


def test_a_model_that_is_not_there_is_the_clients_error(shared):
    with pytest.raises(UserError, match="model 'nobody' does not exist"):
        shared.run("nobody", [datum(3, 1)])


class Fraction(Loss):
    """Counts each target, by an option and by an input of its own."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = float(share)

    def __call__(self, inputs, outputs, fractions):
        mine = torch.stack([torch.as_tensor(row) for row in fractions])
        return LossOutput(-(self.share * mine * outputs["logps"]).sum(), 1.0, {"fractions": float(mine.sum())})


class Detached(Loss):
    """Forgets its gradient."""

    def __call__(self, inputs, outputs):
        return LossOutput(outputs["logps"].detach().sum(), 1.0)


class Text(Loss):
    """Gives no number."""

    def __call__(self, inputs, outputs):
        return "much"


def plugin(monkeypatch, loss=Fraction, **fields):
    """Have the registry offer a plugin's loss."""
    values = {"kind": "loss", "name": "Fraction", "ref": f"{__name__}:{loss.__name__}", "runtimes": ("local", "served")}
    spec = ComponentSpec(**{**values, "tenant_safe": True, "inputs": {"fractions": "float32[T]"}, **fields})
    own, load = registry().specs("loss"), type(registry()).load
    monkeypatch.setattr(type(registry()), "specs", lambda self, kind: {**own, "Fraction": [spec]})
    monkeypatch.setattr(type(registry()), "load", lambda self, x: loss if x is spec else load(self, x))


def test_an_installed_plugin_is_a_loss_by_its_name(shared, monkeypatch):
    plugin(monkeypatch)
    monkeypatch.setattr(shared.executor, "_losses", Losses())
    tokens, inputs = datum(6, 1)
    fractions = np.linspace(0, 1, 6, dtype=np.float32)
    own = {"target_tokens": inputs["target_tokens"], "fractions": fractions}
    other = (tokens[:6], {**own, "fractions": fractions[::-1].copy()})
    logprobs, metrics = shared.run("a", [(tokens, own), other], "Fraction", share=0.5)
    plain, said = shared.run(
        "b", [(tokens, {**inputs, "weights": 0.5 * fractions}), (tokens, {**inputs, "weights": 0.5 * fractions[::-1]})]
    )
    assert metrics["loss:sum"] == pytest.approx(said["loss:sum"], rel=1e-5)
    assert metrics["fractions:sum"] == pytest.approx(6.0)
    assert all((one == two).all() for one, two in zip(logprobs, plain, strict=True))
    norms = [shared.step(queue_id, learning_rate=0.0)["grad_norm"] for queue_id in "ab"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    with pytest.raises(UserError, match="'Fraction' requires the loss_fn_input 'fractions'"):
        shared.run("a", [(tokens, inputs)], "Fraction")
    for weights in (np.array([0, 1, 1, 0, 1, 1], np.float32), None):
        given = {**own, "weights": weights} if weights is not None else own
        shared.run("a", [(tokens, given)], "Fraction", forward=True)
    with pytest.raises(UserError, match="'Fraction' only accepts the weights 0"):
        shared.run("a", [(tokens, {**own, "weights": fractions})], "Fraction")
    short = (tokens, {**own, "fractions": fractions[:4]})
    with pytest.raises(UserError, match=r"datum 0: fractions must have the shape float32\[T\] .* got \[4\]"):
        shared.run("a", [short], "Fraction")
    with pytest.raises(UserError, match=r"weigth|weights"):
        shared.run("a", [(tokens, own)], "Fraction", weigth=1.0)


@pytest.mark.parametrize("fields", [{"tenant_safe": False}, {"runtimes": ("local",)}])
def test_a_plugin_that_does_not_say_it_is_safe_and_served_is_none(monkeypatch, fields):
    plugin(monkeypatch, **fields)
    assert "Fraction" not in Losses().names()


@pytest.mark.parametrize(("loss", "words"), [(Detached, "has no gradient"), (Text, "returned a str")])
def test_a_plugin_that_gives_nothing_to_train_by_is_said_so(shared, monkeypatch, loss, words):
    plugin(monkeypatch, loss, inputs={})
    monkeypatch.setattr(shared.executor, "_losses", Losses())
    with pytest.raises(UserError, match=words):
        shared.run("a", [broken(weights=None)], "Fraction")


def test_weights_reach_a_plugin_that_reads_them(shared):
    tokens, inputs = datum(6, 1)
    inputs = {**inputs, "weights": np.array([0.5, 2, 0, 1, -1, 0.25], np.float32)}
    [one], metrics = shared.run("a", [(tokens, inputs)], "CrossEntropyLoss", forward=True)
    [other], said = shared.run("a", [(tokens, inputs)], forward=True)
    assert metrics["loss:sum"] == pytest.approx(said["loss:sum"], rel=1e-5)
    assert one[inputs["weights"] != 0] == pytest.approx(other[inputs["weights"] != 0])


def test_an_operator_chooses_which_plugins_there_are(monkeypatch):
    plugin(monkeypatch)
    assert Losses(()).names() == (*PUBLISHED, *OWN)
    assert Losses(("Fraction",)).names() == (*PUBLISHED, *OWN, "Fraction")


def test_a_device_that_fails_ends_everything(shared, monkeypatch):
    def fails(operations):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(shared.pool, "run", fails)
    with pytest.raises(EngineFault, match="device failed"):
        shared.run("a", [datum(3, 1)])


def test_a_pass_that_breaks_off_may_be_tried_again_only_if_nothing_of_it_was_kept(shared, monkeypatch):
    def fails(*arguments):
        raise MemoryError("no memory")

    pool = shared.pool
    for method, found in (("execute", MemoryError), ("finish", EngineFault)):
        with monkeypatch.context() as patch:
            patch.setattr(pool, method, fails)
            with pytest.raises(found):
                shared.run("a", [datum(3, 1)])
    shared.step("a", learning_rate=0.0)


def test_a_step_that_breaks_off_is_not_tried_again(shared, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("some were updated")

    shared.run("a", [datum(3, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(shared.pool, "step", fails)
        with pytest.raises(EngineFault, match="optimizer step stopped halfway"):
            shared.step("a")
    shared.step("a", learning_rate=0.0)


def test_sampling_that_fails_between_the_pieces_of_a_pass_ends_everything(shared, monkeypatch):
    def fails():
        raise ValueError("not expected")

    pool = shared.pool
    monkeypatch.setattr(pool, "between", pool.between)
    monkeypatch.setattr(pool, "tokens_per_pass", 4)
    shared.executor.interrupt(fails)
    with pytest.raises(EngineFault, match="was stopped by"):
        shared.run("a", [datum(3, 1), datum(3, 2)])


def test_memory_that_is_full_is_the_services_fault_and_tells_nothing_of_others(base, fresh):
    small = fresh(extra={"model": {"adapter_memory": 100_000}})
    small.create("a", rank=2)
    with pytest.raises(CapacityError) as caught:
        small.create("b", rank=512)
    assert "model-" not in str(caught.value)

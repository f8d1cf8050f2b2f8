"""Lines 30 to 37 and 41 to 48: forward and forward_backward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_sdk as sdk
import zstandard
from server_raw import PROTOBUF, Failed, Raw, arrays, datum, pass_body, row, sparse
from server_reference import Reference, export
from serving import Served
from tinker.proto import tinker_public_pb2 as public
from tinker.proto.response_conv import deserialize_proto_response

from twinkle_server.wire import tinker_pb2 as wire

GOLDEN = bytes.fromhex(
    "0a016d10011a640a100a0e0a0c01000000020000000300000012300a0d7461726765745f746f6b656e73121f0a18020000000000000003"
    "0000000000000004000000000000001802220103121e0a077765696768747312130a0c000000000000803f0000803f1801220103220d63"
    "726f73735f656e74726f7079"
)
LONG, SHORT = list(range(5, 45)), [9, 8, 7]


def trained(raw: Raw, **fields: Any) -> Any:
    """Return a model whose B is no longer 0."""
    model = raw.model(**fields)
    model.train(LONG, steps=2)
    return model


def test_line_30_the_golden_request_is_read_as_it_was_meant(raw: Raw, tiny: Path) -> None:
    body = public.ForwardBackwardRequest.FromString(GOLDEN)
    model = raw.model()
    body.model_id = model.id
    body.seq_id = model.next()
    answer = raw.send("/forward_backward", body.SerializeToString())
    output = raw.result(answer.json()["request_id"], "pass")
    expected = Reference(tiny).scores([1, 2, 3, 4]).numpy()
    np.testing.assert_allclose(arrays(output)[0], expected, atol=2e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-expected[1:].sum(), abs=1e-4)


def test_line_31_a_body_in_zstd_is_read(raw: Raw) -> None:
    model = raw.model()
    plain = arrays(model.forward([row(LONG)]))[0]
    packed = zstandard.compress(pass_body(model.id, model.next(), [row(LONG)], forward_only=True))
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    answer = raw.http.post("/forward_backward", content=packed, headers=headers)
    assert answer.status_code == 200, answer.text
    assert np.array_equal(arrays(raw.result(answer.json()["request_id"], "pass"))[0], plain)


def test_line_32_a_pass_answers_in_protobuf_one_output_a_datum_in_order(raw: Raw) -> None:
    model = raw.model()
    lengths = [2, 17, 3, 40, 5]
    request = model.submit_pass([row(list(range(1, size + 1))) for size in lengths])
    raw.result(request, "pass")
    answer = raw.poll(request, proto=True)
    assert answer.headers["content-type"].startswith(PROTOBUF)
    output = wire.ForwardBackwardOutput.FromString(answer.content)
    assert [len(array) for array in arrays(output)] == [size - 1 for size in lengths]
    from tinker.types import ForwardBackwardOutput

    theirs = deserialize_proto_response(answer.content, ForwardBackwardOutput)
    assert [out["logprobs"].shape for out in theirs.loss_fn_outputs] == [[size - 1] for size in lengths]


def test_line_33_a_forward_pass_leaves_no_gradient(raw: Raw, tmp_path: Path) -> None:
    files = []
    for at in range(2):
        model = raw.model(lora={"seed": 3})
        for _ in range(2):
            model.forward_backward([row(LONG)])
            if at:
                model.forward([row(SHORT)])
            model.step(learning_rate=1e-2)
        files.append(export(model, f"m{at}", tmp_path) / "adapter_model.safetensors")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_line_34_position_i_scores_target_i_without_a_shift(raw: Raw, tiny: Path) -> None:
    targets = [200, 3, 77, 5]
    output = raw.model().forward([datum([1, 2, 3, 4], target_tokens=targets, weights=[1.0] * 4)])
    expected = Reference(tiny).logps([1, 2, 3, 4], targets).detach().numpy()
    np.testing.assert_allclose(arrays(output)[0], expected, atol=2e-5)


def test_line_35_metrics_are_named_as_the_sdk_wants_them(raw: Raw) -> None:
    model = raw.model()
    for output in (model.forward_backward([row(LONG), row(SHORT)]), model.forward([row(SHORT)])):
        assert "loss:sum" in output.metrics
        for key in output.metrics:
            name, _, reduction = key.partition(":")
            assert name, key
            assert reduction in ("sum", "min", "max", "mean", "slack", "hash2", "unique"), key


def test_line_36_the_loss_is_the_weighted_sum_of_what_is_returned(raw: Raw) -> None:
    weights = [1.0, -0.5, 0.25, 0.0, 3.0]
    output = raw.model().forward_backward([row([1, 5, 9, 4, 8, 2], weights), row(SHORT)])
    first, second = arrays(output)
    assert output.metrics["loss:sum"] == pytest.approx(-(np.dot(weights, first) + second.sum()), rel=1e-5)


def test_line_37_several_targets_a_position_dense_and_sparse(raw: Raw, tiny: Path, tmp_path: Path) -> None:
    targets = np.array([[5, 6, 7], [8, 0, 0], [9, 10, 0]])
    weights = np.array([[0.5, 0.25, 0.25], [1.0, 0, 0], [0.75, 0.25, 0]], np.float32)
    dense = datum([1, 2, 3], target_tokens=targets, weights=weights)
    thin = datum([1, 2, 3])
    thin.loss_fn_inputs["target_tokens"].CopyFrom(sparse(targets))
    thin.loss_fn_inputs["weights"].CopyFrom(sparse(weights))
    files, losses = [], []
    for at, made in enumerate((dense, thin)):
        model = raw.model(lora={"seed": 5})
        output = model.forward_backward([made, row(LONG)])
        assert [array.shape for array in arrays(output)] == [(3, 3), (39,)]
        asked = weights > 0
        expected = Reference(tiny).logps([1, 2, 3], targets).detach().numpy()
        np.testing.assert_allclose(arrays(output)[0][asked], expected[asked], atol=2e-5)
        losses.append(output.metrics["loss:sum"])
        assert losses[-1] == pytest.approx(-(weights * expected).sum() - arrays(output)[1].sum(), rel=1e-4)
        model.step(learning_rate=1e-2)
        files.append(export(model, f"m{at}", tmp_path) / "adapter_model.safetensors")
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert files[0].read_bytes() == files[1].read_bytes()


def bad_rows() -> dict[str, tuple[Any, str, str]]:
    """Return what is wrong, with the loss and a word that the error must hold."""
    ok = row([1, 2, 3])
    image = wire.Datum()
    image.CopyFrom(ok)
    image.model_input.add().image.data = b"\x89PNG"
    dmel = wire.Datum()
    dmel.CopyFrom(ok)
    dmel.model_input.add().dmel.dmel = b"x"
    plain = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    rl = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    return {
        "unknown loss": (ok, "no_such_loss", "no_such_loss"),
        "no targets": (datum([1, 2], weights=[1.0, 1.0]), "cross_entropy", "target_tokens"),
        "no input of any loss": (datum([1, 2], **plain, reward=[1.0, 1.0]), "cross_entropy", "reward"),
        "no advantages": (datum([1, 2], **{k: v for k, v in rl.items() if k != "advantages"}), "ppo", "advantages"),
        "no logprobs": (
            datum([1, 2], **{k: v for k, v in rl.items() if k != "logprobs"}), "importance_sampling", "logprobs"
        ),
        "no mask": (datum([1, 2], **rl), "gspo", "sequence_ratio_mask"),
        "length": (datum([1, 2], **{**plain, "weights": [1.0]}), "cross_entropy", "weights"),
        "targets' length": (datum([1, 2], target_tokens=[2], weights=[1.0]), "cross_entropy", "target_tokens"),
        "vocabulary": (datum([1, 99999], **plain), "cross_entropy", "99999"),
        "negative token": (datum([1, -7], **plain), "cross_entropy", "-7"),
        "target": (datum([1, 2], **{**plain, "target_tokens": [2, 88888]}), "cross_entropy", "88888"),
        "nan": (datum([1, 2], **{**plain, "weights": [1.0, float("nan")]}), "cross_entropy", "weights"),
        "inf": (datum([1, 2], **{**rl, "advantages": [float("inf"), 0.0]}), "ppo", "advantages"),
        "nothing": (datum([], target_tokens=np.zeros(0, int), weights=np.zeros(0)), "cross_entropy", ""),
        "image": (image, "cross_entropy", "image"),
        "dmel": (dmel, "cross_entropy", "dmel"),
    }  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", bad_rows())
def test_lines_41_47_59_a_bad_row_fails_its_own_future_in_words(raw: Raw, tmp_path: Path, wrong: str) -> None:
    bad, loss, word = bad_rows()[wrong]
    model = raw.model(lora={"rank": 2})
    before = model.logprobs(SHORT)
    good = {"target_tokens": [8, 7], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
    neighbour = bad if loss == "gspo" else datum([9, 8], **good) if "logprobs" in bad.loss_fn_inputs else row(SHORT)
    with pytest.raises(Failed) as failed:
        model.forward_backward([neighbour, bad], loss)
    assert failed.value.category == "user"
    assert word in failed.value.error
    model.step(learning_rate=1.0)  # had anything of the row's neighbour been added, this would show it
    assert np.array_equal(model.logprobs(SHORT), before)


@pytest.mark.full
def test_line_42_gradients_are_summed_over_datums_and_requests(raw: Raw, tiny: Path, tmp_path: Path) -> None:
    adam = {"learning_rate": 0.5, "eps": 10.0}  # so large an eps makes the update proportional to the gradient
    start = trained(raw).save("start")
    reference = Reference(tiny, export(raw.load(start, optimizer=False), "start", tmp_path))
    for tokens in (LONG, SHORT):
        (-reference.logps(tokens[:-1], tokens[1:]).sum()).backward()
    reference.step(adam)
    expected = reference.scores(LONG).numpy()
    for requests in ([[row(LONG), row(SHORT)]], [[row(LONG)], [row(SHORT)]]):
        model = raw.load(start, optimizer=False)
        before = model.logprobs(LONG)
        for data in requests:
            model.forward_backward(data)
        model.step(**adam)
        np.testing.assert_allclose(model.logprobs(LONG), expected, atol=1e-4)
        assert np.abs(before - expected).max() > 1e-2


def test_line_43_neighbours_and_padding_change_nothing(raw: Raw) -> None:
    model = trained(raw)
    alone = arrays(model.forward([row(SHORT)]))[0]
    mixed = arrays(model.forward([row(LONG), row(SHORT), row(LONG * 3)]))[1]
    np.testing.assert_allclose(alone, mixed, atol=1e-5)


@pytest.mark.full
def test_line_44_the_sdk_puts_many_chunks_together_in_order(served: Served, tiny: Path) -> None:
    with sdk.opened(served.url) as client:
        training = sdk.trainer(client, str(tiny), rank=2)
        rows = [sdk.row([1 + at % 250, 2 + at % 250, 3]) for at in range(1100)]
        output = training.forward(rows, "cross_entropy").result(90)
        parts = [training.forward([rows[at]], "cross_entropy").result(60) for at in (0, 1023, 1024, 1099)]
    assert len(output.loss_fn_outputs) == 1100
    for at, part in zip((0, 1023, 1024, 1099), parts, strict=True):
        np.testing.assert_allclose(
            output.loss_fn_outputs[at]["logprobs"].data, part.loss_fn_outputs[0]["logprobs"].data, atol=1e-5
        )
    total = -sum(float(np.sum(out["logprobs"].data)) for out in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


@pytest.mark.full
def test_line_45_a_custom_loss_that_is_cross_entropy_gives_its_update(served: Served, tiny: Path) -> None:
    weights = np.array([1.0, -0.5, 2.0, 0.25], np.float32)

    def negative_log_likelihood(data: Any, logprobs: Any) -> Any:
        import torch

        total = -sum((torch.tensor(weights) * part).sum() for part in logprobs)
        return total, {"mine": float(total.detach())}

    found = []
    with sdk.opened(served.url) as client:
        for custom in (False, True):
            training = sdk.trainer(client, str(tiny), seed=11)
            data = [sdk.row([1, 5, 9, 4, 8], weights.tolist())]
            for _ in range(2):
                if custom:
                    output = training.forward_backward_custom(data, negative_log_likelihood).result(60)
                else:
                    output = training.forward_backward(data, "cross_entropy").result(60)
                training.optim_step(sdk.tinker.AdamParams(learning_rate=1e-2)).result(60)
            found.append((output.metrics["loss:sum"], sdk.logprobs(training, LONG)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


def test_line_46_a_row_longer_than_the_context_fails_with_both_numbers(raw: Raw) -> None:
    with pytest.raises(Failed, match=r"(?s)512.*700|700.*512") as failed:
        raw.model().forward_backward([row([1] * 701)])
    assert failed.value.category == "user"


@pytest.mark.full
def test_line_48_one_request_without_memory_fails_alone(tmp_path: Path, tiny: Path) -> None:
    from serving import ledger

    del tiny
    service = ledger(tmp_path / "data", {"extra": {"memory": [66]}}).start()
    try:
        with Raw(service.url) as raw:
            models = [raw.model(raw.session()) for _ in range(2)]
            bad = models[0].submit_pass([row([66, 2, 3])])
            good = [models[1].submit_pass([row([at, 2, 3])]) for at in range(1, 6)]
            with pytest.raises(Failed) as failed:
                raw.result(bad, "pass")
            assert failed.value.category == "server"
            assert all(raw.result(request, "pass") for request in good)
            assert models[0].forward_backward([row([1, 2, 3])])
    finally:
        service.stop()


def test_numbers_after_training_are_those_of_peft_with_the_exported_files(raw: Raw, tiny: Path, tmp_path: Path) -> None:
    model = trained(raw)
    reference = Reference(tiny, export(model, "a", tmp_path))
    np.testing.assert_allclose(model.logprobs(LONG), reference.scores(LONG).numpy(), atol=5e-5)

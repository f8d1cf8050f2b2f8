"""Lines 54 to 60: sequence numbers."""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_sdk as sdk
from server_raw import Failed, Raw, RawModel, pass_body, row
from serving import Served

ROWS = [list(range(at, at + 6)) for at in (5, 40, 90, 150)]


def submit_step(model: RawModel, number: int, lr: float = 1e-2) -> str:
    return model.submit("optim_step", number, adam_params={"learning_rate": lr})


def test_line_54_requests_run_by_their_numbers_whatever_their_arrival(raw: Raw) -> None:
    found = []
    for order in ([1, 2, 3, 4], [2, 3, 4, 1], [4, 3, 2, 1]):
        model = raw.model(lora={"seed": 4})
        send = {
            1: lambda model=model: model.submit_pass([row(ROWS[0])], number=1),
            2: lambda model=model: submit_step(model, 2),
            3: lambda model=model: model.submit_pass([row(ROWS[1])], number=3),
            4: lambda model=model: submit_step(model, 4),
        }
        requests = {number: send[number]() for number in order}
        for number, request in requests.items():
            raw.result(request, "pass" if number % 2 else "json")
        model.last = 4
        found.append(model.logprobs(ROWS[2]))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_line_55_submitting_waits_neither_for_missing_numbers_nor_for_work(counted: Raw) -> None:
    model = counted.model()
    start = time.monotonic()
    late = [submit_step(model, number) for number in (5, 4, 3, 2)]
    assert time.monotonic() - start < 5
    assert len(set(late)) == 4
    first = model.submit_pass([row(ROWS[0])], number=1)
    assert counted.result(first, "pass")
    assert [counted.result(request) is not None for request in late] == [True] * 4


def test_line_56_a_repeated_request_has_one_future_and_runs_once(counted: Raw) -> None:
    model = counted.model()
    body = pass_body(model.id, model.next(), [row(ROWS[0])])
    requests = {
        counted.send("/forward_backward", body, headers={"X-Idempotency-Key": str(at)}).json()["request_id"]
        for at in range(4)
    }
    assert len(requests) == 1
    counted.result(requests.pop(), "pass")
    again = counted.send("/forward_backward", body).json()["request_id"]
    assert counted.result(again, "pass")
    other = counted.send("/forward_backward", pass_body(model.id, 1, [row(ROWS[1])]))
    assert other.status_code == 409
    assert "1" in other.json()["detail"]
    assert other.headers["x-should-retry"] == "false"
    step = submit_step(model, model.next())
    assert counted.result(step) is not None
    pending, applied = ledger_of(model)
    assert (len(pending), len(applied)) == (0, 1)


def ledger_of(model: RawModel) -> tuple[list[Any], list[Any]]:
    """Return what the counting engine has pending and applied, one entry a datum."""
    from server_history import read_ledger

    return read_ledger(model.forward([row([1, 2])]))


@pytest.mark.parametrize("body", [b"\x0a\x03abc", b"nonsense", b""])
def test_line_57_a_number_that_was_refused_counts_as_used(counted: Raw, body: bytes) -> None:
    model = counted.model()
    step = {"model_id": model.id, "seq_id": model.next(), "adam_params": {"learning_rate": "much"}}
    assert "learning_rate" in counted.refusal("/optim_step", step)
    assert counted.send("/forward_backward", body).status_code == (422 if b"abc" in body else 400)
    # Had the number not been used up, this would fail behind the gap; what had no number used none up.
    assert model.forward_backward([row(ROWS[0])])


def test_line_58_what_waits_for_a_number_that_never_comes_fails(counted: Raw) -> None:
    model = counted.model()
    request = submit_step(model, 2)
    with pytest.raises(Failed, match="1") as failed:
        counted.result(request)
    assert failed.value.category == "user"
    model.last = 2
    assert model.forward_backward([row(ROWS[0])]), "the queue goes on behind the gap"


@pytest.mark.full
def test_line_58_a_request_that_comes_after_its_number_was_given_up_is_told_so_and_never_runs(counted: Raw) -> None:
    model = counted.model()
    with pytest.raises(Failed, match="number 1 of this model did not arrive"):
        counted.result(submit_step(model, 2))
    late = counted.send("/forward_backward", pass_body(model.id, 1, [row(ROWS[0])]))
    assert late.status_code == 200, "the SDK repeats a 409 for five minutes"
    with pytest.raises(Failed, match=r"cannot run sequence number 1 .* nothing was computed") as failed:
        counted.result(late.json()["request_id"], "pass")
    assert failed.value.category == "user"
    model.last = 2
    assert ledger_of(model) == ([], [])


@pytest.mark.full
def test_line_58_the_sdk_goes_on_after_a_request_that_failed_in_the_client(served: Served, tiny: Path) -> None:
    image = sdk.tinker.types.ImageAssetPointerChunk(format="png", location="file:///none.png", expected_tokens=2)
    broken = sdk.row(ROWS[0])
    broken.model_input.chunks.insert(0, image)
    adam = sdk.tinker.AdamParams(learning_rate=1e-2)
    found = []
    with sdk.opened(served.url) as client:
        for fails in (True, False):
            training = sdk.trainer(client, str(tiny), seed=3)
            if fails:
                with pytest.raises(ValueError, match="Unsupported model input chunk"):
                    training.forward_backward([broken], "cross_entropy").result(sdk.SECONDS)
                with pytest.raises(
                    sdk.tinker.RequestFailedError, match="number 1 of this model did not arrive"
                ) as told:
                    training.optim_step(adam).result(sdk.SECONDS)
                assert "uses up its number" in str(told.value)
            training.forward_backward([sdk.row(ROWS[1])], "cross_entropy").result(sdk.SECONDS)
            training.optim_step(adam).result(sdk.SECONDS)
            found.append(sdk.logprobs(training, ROWS[2]))
    assert found[0] == found[1]


@pytest.mark.full
def test_line_60_models_trained_at_once_are_as_if_alone(raw: Raw) -> None:
    def train(models: list[tuple[RawModel, list[int]]]) -> list[Any]:
        requests = []
        for _, (model, tokens) in itertools.product(range(3), models):
            requests += [(model.submit_pass([row(tokens)]), "pass"), (submit_step(model, model.next()), "json")]
        for request, kind in requests:
            raw.result(request, kind)
        return [model.logprobs(ROWS[3]) for model, _ in models]

    def made(at: int) -> RawModel:
        return raw.model(lora={"rank": 4 * (1 + at), "seed": at})

    def companions() -> float:
        figures = raw.figures()
        total, passes = (
            figures.get(f'twinkle_pass_operations_{name}{{kind="pass"}}', 0.0) for name in ("sum", "count")
        )
        return total - passes

    rows = dict(enumerate(ROWS[:3]))
    models, busy, before = [(made(at), rows[at]) for at in rows], raw.model(), companions()
    long = busy.submit_pass([row(list(range(5, 125)))] * 50)  # while it runs, the others' passes come together
    together = train(models)
    raw.result(long, "pass")
    assert companions() - before >= 2, "all three were in one pass"
    for at in rows:
        (alone,) = train([(made(at), rows[at])])
        np.testing.assert_allclose(together[at], alone, atol=1e-5)
    assert all(not np.allclose(together[0], other, atol=1e-3) for other in together[1:])

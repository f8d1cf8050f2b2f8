"""Lines 54 to 60: sequence numbers."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
from server_raw import Failed, Raw, RawModel, pass_body, row

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
    if other.status_code == 200:
        with pytest.raises(Failed):
            counted.result(other.json()["request_id"], "pass")
    else:
        assert other.status_code == 409
        assert other.json()["detail"]
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
    number = model.next()
    answers = [
        counted.send("/optim_step", {"model_id": model.id, "seq_id": number, "adam_params": {"learning_rate": "much"}}),
    ]
    for answer in answers:
        if answer.status_code == 200:
            with pytest.raises(Failed):
                counted.result(answer.json()["request_id"])
        else:
            assert answer.status_code in (400, 422), answer.text
    counted.send("/forward_backward", body)  # without a number that could be read it uses none up
    start = time.monotonic()
    assert model.forward_backward([row(ROWS[0])])
    assert time.monotonic() - start < 1.8, "it waited for the number until the gap failed"


def test_line_58_what_waits_for_a_number_that_never_comes_fails(counted: Raw) -> None:
    model = counted.model()
    request = submit_step(model, 2)
    with pytest.raises(Failed, match="1") as failed:
        counted.result(request)
    assert failed.value.category == "user"
    model.last = 2
    assert model.forward_backward([row(ROWS[0])]), "the lane goes on behind the gap"


def test_line_60_models_trained_at_once_are_as_if_alone(raw: Raw) -> None:
    def train(models: list[RawModel]) -> list[Any]:
        requests = []
        for _, (model, tokens) in itertools.product(range(3), zip(models, ROWS, strict=False)):
            requests += [(model.submit_pass([row(tokens)]), "pass"), (submit_step(model, model.next()), "json")]
        for request, kind in requests:
            raw.result(request, kind)
        return [model.logprobs(ROWS[3]) for model in models]

    together = train([raw.model(lora={"rank": 4 * (1 + at), "seed": at}) for at in range(3)])
    alone = [train([raw.model(lora={"rank": 4, "seed": 0})])[0]]
    np.testing.assert_allclose(together[0], alone[0], atol=1e-5)

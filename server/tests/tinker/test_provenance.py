"""`record_stability_info`, and what a pass of `stable_reinforce` says of where its tokens were sampled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from twinkle_server.tinker import provenance
from twinkle_server.wire import tinker_pb2 as pb
from twinkle_server.wire.codec import write_tensor

BASE = "/models/of/tiny/v1"
PROMPT = [1, 2, 3]
SAMPLED = [7, 8]  # what the canned service samples


def answer(client: httpx.Client, promise: httpx.Response) -> dict[str, Any]:
    """Return the result of a future if it is JSON; those of passes and samples are not, unless they failed."""
    assert promise.status_code == 200, promise.text
    result = client.post("/retrieve_future", json={"request_id": promise.json()["request_id"]})
    return dict(result.json()) if "json" in result.headers["content-type"] else {}


class Loop:
    """A client's session with a model and a sampler."""

    def __init__(self, client: httpx.Client) -> None:
        self.client, self.number = client, 0
        self.session = client.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        self.model = answer(client, client.post("/create_model", json=body))["model_id"]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": BASE}
        self.sampler = client.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        self.asked = 0

    def sample(self, record: bool = True, count: int = 2) -> list[str]:
        body = {
            "prompt": {"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 2},
            "num_samples": count, "sampling_session_id": self.sampler, "seq_id": self.asked,
            "record_stability_info": record,
        }  # fmt: skip
        self.asked += 1
        promise = self.client.post("/asample", json=body)
        assert "error" not in answer(self.client, promise)
        return list(promise.json()["sample_sequence_ids"])

    def train(
        self, sequence: str, tokens: list[int] = SAMPLED, offset: int = 0, loss: str = "stable_reinforce",
        width: int | None = None, more: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        self.number += 1
        request = pb.ForwardBackwardRequest(model_id=self.model, seq_id=self.number, loss_fn=loss)
        for name in (sequence, *more):
            datum = request.data.add()
            everything = [*PROMPT, *tokens]
            datum.model_input.add().encoded_text.tokens = np.array(everything[:-1], "<i4").tobytes()
            targets = np.array(everything[1:])
            if width is not None:  # of candidates per position
                targets = np.repeat(targets[:, None], width, axis=1)
            datum.loss_fn_inputs["target_tokens"].CopyFrom(write_tensor(targets))
            for field, prompt, drawn in (
                (datum.model_input_spans, len(PROMPT), len(tokens) - 1),
                (datum.loss_fn_input_spans, len(PROMPT) - 1, len(tokens)),
            ):
                field.add().prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id=name, length=prompt))
                span = pb.SampledProvenanceSpan(sequence_id=name, length=drawn, offset=offset)
                field.add().sampled_tokens.MergeFrom(span)
        headers = {"Content-Type": "application/x-protobuf"}
        promise = self.client.post("/forward_backward", content=request.SerializeToString(), headers=headers)
        return answer(self.client, promise)


@pytest.fixture
def loop(served: Any) -> Loop:
    return Loop(served.http())


def test_a_recorded_sequence_can_be_trained_on(served: Any, loop: Loop) -> None:
    for sequence in loop.sample():
        assert "error" not in loop.train(sequence)
    assert served.service.submissions[-1].refusal is None


def test_a_sequence_that_was_not_recorded_is_refused_and_the_answer_says_how_to_record(loop: Loop) -> None:
    failed = loop.train(loop.sample(record=False)[0])
    assert failed["category"] == "user"
    assert "datum 0" in failed["error"]
    assert "record_stability_info=True" in failed["error"]
    assert "24 hours" in failed["error"]
    assert "error" not in loop.train(loop.sample()[0])  # the number was used up, and the next goes on


def test_sequences_of_another_session_or_tenant_are_refused(served: Any, loop: Loop) -> None:
    sequence = loop.sample()[0]
    for other in (Loop(loop.client), Loop(served.http("b"))):
        assert "one that this session sampled" in other.train(sequence)["error"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("index", "tokens", "offset", "words"),
    [
        (0, [7, 9], 0, "its token 1 is 8, got 9"),
        (0, [8], 0, "its token 0 is 7, got 8"),
        (0, SAMPLED, 1, "must end within its 2 tokens, got offset 1 and length 2"),
        (5, SAMPLED, 0, "does not exist"),
    ],
)
def test_what_a_span_says_must_be_what_was_sampled(
    loop: Loop, index: int, tokens: list[int], offset: int, words: str
) -> None:
    request = loop.sample()[0].rpartition(":")[0]
    failed = loop.train(f"{request}:{index}", tokens, offset)
    assert failed["category"] == "user"
    assert words in failed["error"]


def test_a_part_of_a_sequence_may_be_trained_on(loop: Loop) -> None:
    assert "error" not in loop.train(loop.sample()[0], [8], offset=1)


def test_several_targets_a_position_are_left_to_the_engine_which_refuses_them(served: Any, loop: Loop) -> None:
    assert "error" not in loop.train(loop.sample()[0], width=3)
    assert served.service.submissions[-1].refusal is None


def test_results_of_sampling_requests_are_compared_one_after_the_other(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[set[str]] = []
    compare = provenance._compare

    def noted(claims: Any, result: bytes) -> str | None:
        compared.append({claim.request for claim in claims})
        return compare(claims, result)

    monkeypatch.setattr(provenance, "_compare", noted)
    first, second = loop.sample(), loop.sample()
    assert "error" not in loop.train(first[0], more=[second[0], first[1]])
    assert compared == [{first[0].rpartition(":")[0]}, {second[0].rpartition(":")[0]}]


def test_other_losses_do_not_look_at_provenance(loop: Loop) -> None:
    assert "error" not in loop.train("made-up:0", loss="importance_sampling")


def test_a_sampling_request_that_is_not_over_has_no_sequences_yet(served: Any, loop: Loop) -> None:
    served.service.held = True
    body = {
        "prompt": {"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 2},
        "num_samples": 1, "sampling_session_id": loop.sampler, "seq_id": 9, "record_stability_info": True,
    }  # fmt: skip
    sequence = loop.client.post("/asample", json=body).json()["sample_sequence_ids"][0]
    served.service.held = False
    assert "its status is 'pending'" in loop.train(sequence)["error"]


def test_strict_losses_leave_the_refusal_to_the_engine(served: Any, loop: Loop) -> None:
    sequence = loop.sample(record=False)[0]
    served.state.settings = replace(served.state.settings, strict_losses=True)
    try:
        loop.train(sequence)
    finally:
        served.state.settings = replace(served.state.settings, strict_losses=False)
    assert served.service.submissions[-1].refusal is None

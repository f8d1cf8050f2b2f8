"""The sampler over a scripted service: progress in the log, and the weights of a path that was saved again."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from twinkle.errors import ArgumentError
from twinkle_client import Connection, TwinkleClient, init_tinker_client, vLLMSampler, wire


@pytest.fixture
def service() -> Any:
    """A client of a service whose first answer to each request for sequences is that one of two prompts is complete."""
    seen: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/twinkle")
        body = wire.unpack(request.content) if request.content else None
        seen.append((path, body))
        if path == "/create_session":
            return httpx.Response(200, json={"session_id": "s"})
        if path == "/samplers":
            return httpx.Response(200, json={"sampler_id": f"sampler{body['sampler_seq_id']}"})
        if path.endswith("/sample"):
            if seen.count((path, body)) == 1:
                state = {"status": "pending", "queue_state": "active", "reason": "busy", "done": 1, "total": 2}
                return httpx.Response(202, json=state)
            value = [{"sequences": []} for _ in body["inputs"]]
            return httpx.Response(200, content=wire.pack({"value": value}), headers={"content-type": wire.CONTENT_TYPE})
        return httpx.Response(200, json={})

    connection = Connection("http://127.0.0.1:9", transport=httpx.MockTransport(answer))
    with TwinkleClient(connection=connection, session_heartbeat_interval=1000) as client:
        yield SimpleNamespace(client=client, seen=seen)


def test_progress_of_sampling_is_logged(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "twinkle")
    sampler = vLLMSampler(client=service.client)
    assert len(sampler.sample([{"input_ids": [1]}, {"input_ids": [2]}])) == 2
    assert "sample waits (1 of 2 prompts are complete; active: busy)" in caplog.messages


def test_a_path_that_was_saved_again_is_read_again(service: Any) -> None:
    sampler, path = vLLMSampler(client=service.client), "twinkle://run/sampler_weights/w"
    for saves in (0, 0, 1, 1):
        if saves > service.client.saves_of(path):
            service.client.note_save(path.replace("twinkle://", "tinker://"))
        sampler.sample([{"input_ids": [1]}], adapter_uri=path)
    created = [body for name, body in service.seen if name == "/samplers"]
    assert [body["adapter_uri"] for body in created] == [path, path]
    sampler.follow_checkpoint(path)
    sampler.sample([{"input_ids": [1]}])
    sampler.sample([{"input_ids": [1]}], use_base_model=True)
    assert [body["adapter_uri"] for name, body in service.seen if name == "/samplers"] == [path, path, None]


def test_options_of_a_local_sampler_are_noted_or_refused(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "twinkle")
    vLLMSampler("m", engine_args={"max_model_len": 64}, client=service.client).reset_prefix_cache()
    assert "engine_args (max_model_len) have no effect" in caplog.text
    with pytest.raises(ArgumentError, match="'enforce_eager' is an option of the service"):
        vLLMSampler("m", enforce_eager=True, client=service.client)
    with pytest.raises(ArgumentError, match="init_tinker_client has no argument 'url'; it takes: base_url, api_key"):
        init_tinker_client(url="http://127.0.0.1:9")

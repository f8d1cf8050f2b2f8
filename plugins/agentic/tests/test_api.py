"""`OpenAI` and `APIMultiTurnRollout` against a server on loopback that does all that servers do."""

import http.server
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twinkle.errors import ArgumentError, Unsupported
from twinkle_agentic.envs import EnvTool
from twinkle_agentic.examples import CountdownEnv
from twinkle_agentic.protocol import APIError, OpenAI
from twinkle_agentic.protocol.openai import OpenAI as PublishedOpenAI
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout as PublishedRollout
from twinkle_agentic.tools import CalculatorTool, ToolManager

KEY = "sk-very-secret-key"
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | bytes


def said(content: str | None = None, finish: str = "stop", **more: Any) -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content, **more}, "finish_reason": finish}]}


def wants(name: str, arguments: str) -> Answer:
    call = {"id": "abc", "type": "function", "function": {"name": name, "arguments": arguments}}
    return said(None, "tool_calls", tool_calls=[call])


class Server(http.server.ThreadingHTTPServer):
    """Answers each request by `answer(body, number)`; keeps the bodies and how many were served at one time.

    An answer that is bytes is sent as it is.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.bodies, self.keys = answer, list[Any](), list[Any]()
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            number = len(self.server.bodies)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        answered = self.server.answer(body, number)
        with self.server.lock:
            self.server.now -= 1
        if isinstance(answered, bytes):
            self.wfile.write(answered)
            return
        status, answer, *headers = answered
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        for name, value in (headers[0] if headers else {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


Serve = Callable[[Callable[[dict[str, Any], int], Answer]], Server]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    made: list[tuple[Server, threading.Thread]] = []
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def start(answer: Callable[[dict[str, Any], int], Answer]) -> Server:
        server = Server(answer)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        made.append((server, thread))
        return server

    yield start
    for server, thread in made:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def client(serve: Serve) -> Iterator[Callable[..., tuple[OpenAI, Server]]]:
    made: list[OpenAI] = []

    def build(answer: Callable[[dict[str, Any], int], Answer], **options: Any) -> tuple[OpenAI, Server]:
        server = serve(answer)
        made.append(OpenAI("small", KEY, server.url, {"timeout": 10.0, "max_retries": 2, **options}))
        return made[-1], server

    yield build
    for each in made:
        each.close()


Client = Callable[..., tuple[OpenAI, Server]]


def ask(*texts: str) -> list[Any]:
    return [{"messages": [{"role": "user", "content": text}], "user_data": [("row", text)]} for text in texts]


def turns_of(body: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def test_the_published_paths_lead_to_the_same_classes() -> None:
    assert (PublishedOpenAI, PublishedRollout) == (OpenAI, APIMultiTurnRollout)


def test_a_request_says_what_openai_documents_and_no_more(client: Client) -> None:
    api, server = client(lambda body, number: said("hello", reasoning_content="hm"))
    row = ask("hi")[0] | {"tools": ToolManager([CalculatorTool()]).tool_infos()}
    row["messages"][0] |= {"weight": 1, "loss": True}
    params = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "seed": 3}
    assert api(row, params, extra_body={"guided": 1}) == {
        "role": "assistant",
        "content": "hello",
        "reasoning_content": "hm",
        "finish_reason": "stop",
    }
    assert server.bodies == [
        {
            "model": "small",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": row["tools"],
            "temperature": 0.5,
            "top_p": 1.0,
            "max_tokens": 7,
            "seed": 3,
            "stop": ["x"],
            "guided": 1,
        }
    ]
    assert server.keys == [f"Bearer {KEY}"]


def test_calls_and_results_are_sent_as_text_with_their_ids(client: Client) -> None:
    api, server = client(lambda body, number: said("5"))
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "1", "tool_call_id": "call_0"},
    ]
    api({"messages": [*ask("hi")[0]["messages"], *messages]})
    sent = server.bodies[0]["messages"]
    assert sent[1]["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    assert sent[2] == {"role": "tool", "content": "1", "tool_call_id": "call_0"}


def test_several_samples_come_as_a_list(client: Client) -> None:
    choices = [{"message": {"content": text}} for text in ("a", "b")]
    api, server = client(lambda body, number: (200, {"choices": choices}))
    found: Any = api(ask("hi")[0], {"num_samples": 2})
    assert [message["content"] for message in found] == ["a", "b"]
    assert server.bodies[0]["n"] == 2


def test_what_is_busy_is_asked_again_and_not_for_ever(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    api, server = client(lambda body, number: (503, "busy") if number < 3 else said("hello"))
    assert api(ask("hi")[0])["content"] == "hello"  # type: ignore[call-overload]
    assert len(server.bodies) == 3
    assert 0 < waited[0] <= waited[1] * 2 <= 2
    api, server = client(lambda body, number: (429, "slow down", {"Retry-After": "9999"}))
    with pytest.raises(APIError, match="gave no answer after 3 attempts: 429 slow down") as caught:
        api(ask("hi")[0])
    assert len(server.bodies) == 3
    assert waited[2:] == [20.0, 20.0]
    assert not caught.value.refused


@pytest.mark.parametrize(("status", "refused"), [(400, False), (401, True), (404, True), (422, False)])
def test_what_is_wrong_is_not_asked_again_and_the_key_is_never_shown(
    client: Client, status: int, refused: bool
) -> None:
    api, server = client(lambda body, number: (status, f"bad key {KEY} " + "x" * 9999))
    with pytest.raises(APIError) as caught:
        api(ask("hi")[0])
    assert len(server.bodies) == 1
    assert caught.value.refused is refused
    text = f"{caught.value} {caught.value!r} {api!r} {caught.value.__cause__} {caught.value.__context__}"
    assert KEY not in text
    assert "bad key ***" in text
    assert len(text) < 2000


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "answer", ["no json", "[1]", "[" * 100_000, {"choices": []}, {"choices": [{}]}, {"error": "none"}]
)
def test_an_answer_that_is_none_is_an_error(client: Client, answer: Any) -> None:
    api, _ = client(lambda body, number: (200, answer))
    with pytest.raises(APIError, match=r"not a JSON object|without choices"):
        api(ask("hi")[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"choices": [', "RemoteProtocolError"),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{"cho', "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd", "DecodingError"),
        (None, "ReadTimeout"),
    ],
    ids=["half a body", "half a chunk", "nothing", "no gzip", "never"],
)
def test_an_answer_that_ends_early_or_never_comes_is_asked_for_again(
    client: Client, payload: bytes | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    over = threading.Event()

    def answer(body: dict[str, Any], number: int) -> bytes:
        return payload if payload is not None else b"" * over.wait(60)

    api, server = client(answer, timeout=0.3 if payload is None else 30.0)
    row: Any = APIMultiTurnRollout(api)(ask("hi"))[0]
    over.set()
    assert row["stop_reason"] == "error"
    assert row["error"].endswith(f"gave no answer after 3 attempts: {says}")
    assert len(server.bodies) == 3


def test_a_server_that_is_away_is_an_error_within_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    api = OpenAI("small", KEY, "http://127.0.0.1:9/v1", {"max_retries": 1, "timeout": 5.0})
    with pytest.raises(APIError, match=r"127\.0\.0\.1, model 'small', gave no answer after 2 attempts: Connect"):
        api(ask("hi")[0])
    api.close()


def test_the_key_comes_from_the_environment_and_travels_to_other_processes_only(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda body, number: said("hello"))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    api = pickle.loads(pickle.dumps(OpenAI("small")))
    monkeypatch.delenv("OPENAI_API_KEY")
    api(ask("hi")[0])
    api.close()
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in repr(api)
    nobody = OpenAI("small", base_url=server.url)
    nobody(ask("hi")[0])
    nobody.close()
    assert server.keys[1] is None


def test_options_that_do_not_fit_are_refused() -> None:
    for url in ("host/v1", "ftp://host", "http://"):
        with pytest.raises(ArgumentError, match="base_url must begin with"):
            OpenAI("small", KEY, url)
    with pytest.raises(ArgumentError, match="client_kwargs has no 'timeouts', nearest: 'timeout'"):
        OpenAI("small", client_kwargs={"timeouts": 3})
    for retries in (-1, "many", True):
        with pytest.raises(ArgumentError, match="max_retries is"):
            OpenAI("small", client_kwargs={"max_retries": retries})
    with pytest.raises(Unsupported, match="leave logprobs out"):
        OpenAI("small")(ask("hi")[0], {"logprobs": 1})
    with pytest.raises(ArgumentError, match="num_samples is 2"):
        APIMultiTurnRollout(OpenAI("small"), sampling_params={"num_samples": 2})
    with pytest.raises(ArgumentError, match="concurrency is 0"):
        APIMultiTurnRollout(OpenAI("small"), concurrency=0)


def test_a_conversation_goes_on_until_there_is_no_call(client: Client) -> None:
    script = [wants("calculator", '{"expression": "2 + 3"}'), said("5")]
    api, server = client(lambda body, number: script[turns_of(body)])
    rollout = APIMultiTurnRollout(api, ToolManager([CalculatorTool()]), {"max_tokens": 9}, extra_body={"min_p": 0.1})
    given = ask("2 + 3?")
    row: Any = rollout(given)[0]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][2] == {"role": "tool", "name": "calculator", "tool_call_id": "abc", "content": "5"}
    assert (row["turns"], row["stop_reason"], row["truncated"]) == (2, "stop", False)
    assert row["user_data"] == [("row", "2 + 3?")]
    assert all("finish_reason" not in message for message in row["messages"])
    assert server.bodies[1]["min_p"] == 0.1
    assert server.bodies[0]["tools"][0]["function"]["name"] == "calculator"
    assert len(given[0]["messages"]) == 1


def test_text_that_is_no_unicode_goes_back_as_it_came(client: Client) -> None:
    script = [wants("calculator", '{"expression": "1"}'), said("ok")]
    script[0][1]["choices"][0]["message"]["content"] = "half a sign \ud83d"
    api, server = client(lambda body, number: script[turns_of(body)])
    (row,) = APIMultiTurnRollout(api, ToolManager([CalculatorTool()]))(ask("?"))
    assert row["stop_reason"] == "stop"  # type: ignore[typeddict-item]
    assert server.bodies[1]["messages"][1]["content"] == "half a sign \ud83d"


def test_a_call_that_a_server_gave_no_id_gets_one_that_its_result_names(client: Client) -> None:
    calls = [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": n}}} for n in "12"]
    script = [said("", tool_calls=calls), said("ok")]
    api, server = client(lambda body, number: script[turns_of(body)])
    APIMultiTurnRollout(api, ToolManager([CalculatorTool()]))(ask("?"))
    _, called, *results = server.bodies[1]["messages"]
    assert [call["id"] for call in called["tool_calls"]] == ["call_0", "call_1"]
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", "call_0"), ("tool", "call_1")]


def test_calls_that_a_server_leaves_in_the_text_are_read_and_broken_ones_answered(client: Client) -> None:
    whole = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    script = [said("<tool_call>{"), said(whole), said("1")]
    api, _ = client(lambda body, number: script[turns_of(body)])
    row: Any = APIMultiTurnRollout(api, ToolManager([CalculatorTool()]))(ask("?"))[0]
    assert [message["role"] for message in row["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row["messages"][2]["content"].startswith("Error: a tool call could not be read.")
    assert row["messages"][4]["content"] == "1"


def test_each_trajectory_ends_in_its_own_way(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def answer(body: dict[str, Any], number: int) -> Answer:
        kind = body["messages"][0]["content"]
        if kind == "breaks":
            return wants("take", '{"number": 1}') if turns_of(body) == 0 else (500, f"oh no {KEY}")
        if kind == "long":
            return said("and so on", "length")
        return wants("take", '{"number": 3}') if kind == "acts" else wants("nothing", "{}")

    api, _ = client(answer)
    managers = [ToolManager(EnvTool.from_env(CountdownEnv(6))) for _ in range(4)]
    rows: Any = APIMultiTurnRollout(api, max_turns=3)(ask("breaks", "long", "acts", "loops"), tool_manager=managers)
    assert [row["stop_reason"] for row in rows] == ["error", "length", "done", "max_turns"]
    assert [row["truncated"] for row in rows] == [False, True, False, True]
    assert [row["turns"] for row in rows] == [1, 1, 2, 3]
    assert rows[2]["turn_rewards"] == [0.0, 1.0]
    assert "500" in rows[0]["error"]
    assert KEY not in str(rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("calls", ["junk", [1], [{"function": 3}], [{"function": {"name": None}}], [{}]])
def test_calls_that_are_none_end_their_own_trajectory(client: Client, calls: Any) -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        odd = body["messages"][0]["content"] == "odd" and turns_of(body) == 0
        return said("", tool_calls=calls) if odd else said("ok")

    api, _ = client(answer)
    odd, fine = APIMultiTurnRollout(api, ToolManager([CalculatorTool()]))(ask("odd", "fine"))
    assert fine["stop_reason"] == "stop"  # type: ignore[typeddict-item]
    assert odd["stop_reason"] == "error"  # type: ignore[typeddict-item]


def test_no_more_conversations_run_at_one_time_than_allowed(client: Client) -> None:
    together = threading.Barrier(2, timeout=30)

    def answer(body: dict[str, Any], number: int) -> Answer:
        together.wait()
        return said("ok")

    api, server = client(answer)
    rows = APIMultiTurnRollout(api, concurrency=2)(ask(*map(str, range(8))))
    assert [row["messages"][0]["content"] for row in rows] == [str(number) for number in range(8)]
    assert server.most == 2


def test_a_wrong_key_is_an_error_of_the_call(client: Client) -> None:
    api, _ = client(lambda body, number: (401, "no such key"))
    with pytest.raises(APIError, match="401 no such key"):
        APIMultiTurnRollout(api)(ask("a", "b"))


def test_a_trace_of_a_service_shows_the_turns_and_no_key(client: Client, tmp_path: Any) -> None:
    api, _ = client(lambda body, number: said("hello") if number < 2 else (400, KEY))
    rollout = APIMultiTurnRollout(api, trace_dir=tmp_path, concurrency=1)
    rollout(ask("a", "b"), global_step=3)
    first, second = (path.read_text("utf-8") for path in sorted(tmp_path.iterdir()))
    assert "hello" in first
    assert "**Ended: error**" in second
    assert KEY not in first + second

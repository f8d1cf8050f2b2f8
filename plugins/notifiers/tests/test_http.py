"""What chat services get, how their refusals are told, what is tried again: against a receiver on this machine."""

import base64
import hashlib
import hmac
import json
import logging
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from receivers import Web, web

from twinkle.errors import ArgumentError
from twinkle.notifier import Notifier
from twinkle_notifiers import delivery
from twinkle_notifiers.ding import DingNotifier
from twinkle_notifiers.feishu import FeishuNotifier
from twinkle_notifiers.slack import SlackNotifier
from twinkle_notifiers.webhook import WebhookNotifier
from twinkle_notifiers.wecom import WeComNotifier

TOKEN = "5b0c1a77d2e94f"
OK = {DingNotifier: '{"errcode":0}', FeishuNotifier: '{"code":0}', WeComNotifier: '{"errcode":0}', SlackNotifier: "ok"}
each = pytest.mark.parametrize("cls", [*OK, WebhookNotifier])


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no proxy, and wait for nothing between attempts."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(delivery, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def receiver() -> Iterator[Web]:
    with web() as found:
        yield found


def build(cls: Any, receiver: Web, **more: Any) -> Notifier:
    receiver.answer((200, OK.get(cls, "whatever")))
    return cls(f"{receiver.address}/send?access_token={TOKEN}", **more)


def text_of(body: Any) -> str:
    """Return the message in what a service got, wherever it lies."""
    inner = body.get("text", body.get("content"))
    return inner if isinstance(inner, str) else next(iter(inner.values()))


@each
def test_a_message_arrives_once_and_as_written(cls: Any, receiver: Web) -> None:
    build(cls, receiver)('run "sft" failed\n漢字 🙂 \\ %s {x}')
    assert [text_of(request.body) for request in receiver.requests] == ['run "sft" failed\n漢字 🙂 \\ %s {x}']
    assert receiver.requests[0].headers["Content-Type"] == "application/json; charset=utf-8"
    assert urllib.parse.urlsplit(receiver.requests[0].path).query == f"access_token={TOKEN}"


@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        (DingNotifier, {"msgtype": "text", "text": {"content": "hi"}}),
        (FeishuNotifier, {"msg_type": "text", "content": {"text": "hi"}}),
        (WeComNotifier, {"msgtype": "text", "text": {"content": "hi"}}),
        (SlackNotifier, {"text": "hi"}),
        (WebhookNotifier, {"text": "hi"}),
    ],
)
def test_the_body_has_the_documented_shape(cls: Any, shape: Any, receiver: Web) -> None:
    build(cls, receiver)("hi")
    assert receiver.requests[0].body == shape


def test_dingtalk_requests_are_signed_with_the_secret_as_key(receiver: Web) -> None:
    build(DingNotifier, receiver, secret="SEC1")("hi")
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(receiver.requests[0].path).query))
    text = f"{query['timestamp']}\nSEC1".encode()
    assert query["sign"] == base64.b64encode(hmac.digest(b"SEC1", text, "sha256")).decode()
    assert abs(int(query["timestamp"]) / 1000 - time.time()) < 60
    assert query["access_token"] == TOKEN


def test_feishu_requests_are_signed_with_time_and_secret_as_key(receiver: Web) -> None:
    build(FeishuNotifier, receiver, secret="SEC2")("hi")
    body = receiver.requests[0].body
    # HMAC written out (RFC 2104), for a key shorter than a block and an empty message.
    key = f"{body['timestamp']}\nSEC2".encode().ljust(64, b"\0")
    inner = hashlib.sha256(bytes(letter ^ 0x36 for letter in key)).digest()
    outer = hashlib.sha256(bytes(letter ^ 0x5C for letter in key) + inner).digest()
    assert body["sign"] == base64.b64encode(outer).decode()
    assert abs(int(body["timestamp"]) - time.time()) < 60


@pytest.mark.parametrize(
    ("cls", "answer", "told"),
    [
        (DingNotifier, {"errcode": 310000, "errmsg": "sign not match"}, "errcode 310000 'sign not match'"),
        (WeComNotifier, {"errcode": 93000, "errmsg": "invalid webhook url"}, "errcode 93000 'invalid webhook url'"),
        (FeishuNotifier, {"code": 19021, "msg": "sign match fail"}, "code 19021 'sign match fail'"),
        (FeishuNotifier, {"StatusCode": 19001, "StatusMessage": "no"}, "code 19001 'no'"),
        (FeishuNotifier, {"what": "else"}, "code None"),
        (SlackNotifier, "<html>portal</html>", "the answer is not that of the service: '\"<html>portal</html>\"'"),
        (DingNotifier, "<html>portal</html>", "the answer is not that of the service"),
    ],
)
def test_an_error_inside_an_answer_of_200_is_seen_and_not_tried_again(
    cls: Any, answer: Any, told: str, receiver: Web, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = build(cls, receiver)
    receiver.answer((200, json.dumps(answer)))
    notifier("hi")
    assert len(receiver.requests) == 1
    assert f"a message to 127.0.0.1 is lost after 1 attempt: {told}" in caplog.text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("cls", "busy"),
    [
        (DingNotifier, (200, '{"errcode":130101,"errmsg":"send too fast"}')),
        (WeComNotifier, (200, '{"errcode":45009}')),
        (FeishuNotifier, (200, '{"code":11232}')),
        *((cls, (status, "")) for cls in (*OK, WebhookNotifier) for status in (429, 500, 503)),
    ],
)
def test_a_busy_service_is_asked_again(cls: Any, busy: Any, receiver: Web, caplog: pytest.LogCaptureFixture) -> None:
    notifier = build(cls, receiver)
    receiver.answer(busy, busy, (200, OK.get(cls, "")))
    notifier("hi")
    assert len(receiver.requests) == 3
    assert caplog.text == ""


@pytest.mark.parametrize("status", [301, 302, 400, 401, 403, 404, 410])
def test_a_refusal_is_not_tried_again_and_a_redirect_not_followed(
    status: int, receiver: Web, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = build(SlackNotifier, receiver)
    receiver.answer((status, "no_service", {"Location": f"{receiver.address}/elsewhere"}))
    notifier("hi")
    assert len(receiver.requests) == 1
    assert f"after 1 attempt: HTTP {status} 'no_service'" in caplog.text


def test_retries_are_as_many_as_asked_for(receiver: Web, caplog: pytest.LogCaptureFixture) -> None:
    notifier = build(SlackNotifier, receiver, retries=2)
    receiver.answer((503, ""))
    notifier("hi")
    assert len(receiver.requests) == 3
    assert "after 3 attempts: HTTP 503" in caplog.text


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_service_that_says_when_is_asked_then(form: str, receiver: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(delivery.time, "sleep", waited.append)
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 7.5))
    notifier = build(SlackNotifier, receiver)
    receiver.answer((429, "", {"Retry-After": "7" if form == "seconds" else later}), (200, "ok"))
    notifier("hi")
    assert len(receiver.requests) == 2
    assert len(waited) == 1
    assert waited[0] == (7 if form == "seconds" else pytest.approx(7, abs=3))


def test_a_service_that_wants_more_time_than_there_is_is_left_alone(
    receiver: Web, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = build(SlackNotifier, receiver)
    receiver.answer((429, "", {"Retry-After": "3600"}), (200, "ok"))
    notifier("hi")
    assert len(receiver.requests) == 1
    assert "after 1 attempt: HTTP 429" in caplog.text


def test_a_retry_after_that_is_none_is_ignored(receiver: Web) -> None:
    for text in ("soon", "-1", "1e9", "", "Thu, 99 Foo"):
        notifier = build(SlackNotifier, receiver)
        receiver.answer((429, "", {"Retry-After": text}), (200, "ok"))
        notifier(text)
    assert len(receiver.requests) == 10


def test_pauses_grow_with_chance_in_them_and_leave_the_generators_of_training_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import random

    monkeypatch.setattr(delivery, "_FIRST_PAUSE", 0.5)
    state = random.getstate()
    pauses = [[delivery._pause(attempt) for _ in range(50)] for attempt in range(1, 8)]
    assert random.getstate() == state
    for attempt, several in enumerate(pauses):
        longest = min(10.0, 0.5 * 2**attempt)
        assert all(longest / 2 <= pause <= longest for pause in several)
        assert len(set(several)) > 1


@pytest.mark.sample(3)
@each
@pytest.mark.parametrize("letter", ["x", "漢", "\n", '"', "🙂", "&"])
def test_a_long_message_keeps_its_ends_and_fits(cls: Any, letter: str, receiver: Web) -> None:
    build(cls, receiver)(f"begin {letter * 150_000} end")
    body = receiver.requests[0].body
    text = text_of(body)
    assert text.startswith("begin ")
    assert text.endswith(" end")
    assert "letters left out" in text
    if cls is SlackNotifier:
        assert 38_000 < len(text) <= 39_000
    elif cls is WeComNotifier:
        assert 2040 < len(text.encode()) <= 2048
    else:
        assert len(json.dumps(body, ensure_ascii=False).encode()) < (100_100 if cls is WebhookNotifier else 20_000)


def test_the_mark_counts_what_is_left_out(receiver: Web) -> None:
    build(WeComNotifier, receiver)("x" * 5000)
    text = text_of(receiver.requests[0].body)
    left_out = int(text.partition("[... ")[2].partition(" ")[0])
    assert left_out + text.replace("letters", "").count("x") == 5000


@each
def test_odd_messages_arrive(cls: Any, receiver: Web) -> None:
    notifier = build(cls, receiver)
    for message in ("", "a\udcffb", "\0", "{message}"):
        notifier(message)
    assert [text_of(request.body) for request in receiver.requests] == ["(an empty message)", "a?b", "\0", "{message}"]


def test_slack_makes_no_link_and_calls_nobody(receiver: Web) -> None:
    build(SlackNotifier, receiver)("<!channel> a & b <https://x|y>")
    assert receiver.requests[0].body == {"text": "&lt;!channel&gt; a &amp; b &lt;https://x|y&gt;"}


def test_a_webhook_sends_headers_and_a_template(receiver: Web) -> None:
    template = {"title": "run: {message}", "tags": ["x", 1, None], "deep": {"body": "{message}"}}
    notifier = build(WebhookNotifier, receiver, headers={"Authorization": "Bearer t0p"}, template=template)
    Notifier.from_dict(json.loads(json.dumps(notifier.to_dict())))("no")
    request = receiver.requests[0]
    assert request.headers["Authorization"] == "Bearer t0p"
    assert request.body == {"title": "run: no", "tags": ["x", 1, None], "deep": {"body": "no"}}


@each
def test_nobody_there_is_a_log_line(cls: Any, caplog: pytest.LogCaptureFixture) -> None:
    cls("http://127.0.0.1:9/x", retries=1)("hi")
    assert "a message to 127.0.0.1 is lost after 2 attempts: ConnectionRefusedError" in caplog.text


def test_something_else_than_http_is_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:

        def rude() -> None:
            for _ in range(2):
                connection, _address = server.accept()
                connection.recv(65_536)
                connection.sendall(b"SSH-2.0 hello\r\n\r\n")
                connection.close()

        thread = threading.Thread(target=rude, daemon=True)
        thread.start()
        SlackNotifier(f"http://127.0.0.1:{server.getsockname()[1]}/x", retries=1)("hi")
        thread.join()
    assert "after 2 attempts: BadStatusLine" in caplog.text


@each
@pytest.mark.parametrize(
    "address",
    ["", "chat.example", "ftp://h/x", "https://", "https://h:port/t0p", "https://h/t0p x", "https://h/t0p\n", "https://h/é",
     "https://u:t0p@h/x", "https://[::1/t0p", None, 3, b"https://h/t0p"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_being_shown(cls: Any, address: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        cls(address)
    assert "t0p" not in str(caught.value)


@each
@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 0), ("timeout", "5"), ("timeout", float("nan")), ("time_limit", -1), ("time_limit", float("inf")),
     ("retries", -1), ("retries", 1.5), ("retries", True)],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{cls.__name__}: {name} is"):
        cls("https://h/x", **{name: value})


@pytest.mark.parametrize(
    "more",
    [{"headers": {"A": "t0p\nB: c"}}, {"headers": {"A b": "t0p"}}, {"headers": {"A": 1}}, {"headers": ["t0p"]},
     {"template": {"x": "y"}}, {"template": {"x": object()}}, {"template": {1: "{message}"}}, {"template": 3},
     {"limit": 5}, {"limit": "many"}],
)  # fmt: skip
def test_a_webhook_that_could_send_nothing_is_refused(more: Any) -> None:
    with pytest.raises(ArgumentError, match="WebhookNotifier") as caught:
        WebhookNotifier("https://h/x", **more)
    assert "t0p" not in str(caught.value)


@each
def test_the_log_repeats_no_secret_that_the_service_repeats(
    cls: Any, receiver: Web, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = build(cls, receiver)
    receiver.answer((403, f"token {TOKEN} is unknown"))
    notifier("hi")
    assert "HTTP 403 'token *** is unknown'" in caplog.text
    assert TOKEN not in repr(notifier) + str(notifier) + f"{[notifier]}"


def test_a_template_may_hold_secrets_too() -> None:
    notifier = WebhookNotifier("https://h/x", template={"token": "t0p-t0p", "text": "{message}"})
    assert "t0p" not in repr(notifier)
    assert "'text': '{message}'" in repr(notifier)


def test_unknown_problems_are_logged_and_never_raised(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RecursionError("t0p")

    monkeypatch.setattr("twinkle_notifiers.slack.post_json", broken)
    SlackNotifier("https://h/x")("hi")
    assert caplog.messages == ["SlackNotifier: a message to h is lost after 1 attempt: RecursionError"]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="twinkle")

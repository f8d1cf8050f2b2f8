"""No secret stays in a line of a log, however it got there."""

import io
import logging

import orjson
import pytest
import structlog

from twinkle_server.telemetry import logs
from twinkle_server.telemetry.logs import redact, tenant_mark
from twinkle_server.tenancy.keys import new_key

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "text",
    [
        "{secret}",
        "key={secret}, next",
        '{{"X-API-Key": "{secret}"}}',
        "[(b'x-api-key', b'{secret}')]",
        "GET /download/{secret}/weights",
        "Authorization: {secret}",
    ],
)
@pytest.mark.parametrize("secret", [new_key(), JWT], ids=["key", "token"])
def test_keys_and_tokens_are_hidden_wherever_they_stand(text: str, secret: str) -> None:
    said = redact(text.format(secret=secret))
    assert "[hidden]" in said
    assert not any(secret[start : start + 12] in said for start in range(len(secret) - 12))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('{"X-API-Key": "of another form"}', "of another"),
        ("headers=[(b'x-api-key', b'other')]", "other"),
        ("X-Api-Key: plain", "plain"),
        ("/download/eyJmIjoiYSJ9.abc_def-ghi/weights", "abc_def-ghi"),
        ("/download/IntcImZcIjpcImNoZWNrcG9pbnRz.Qabc-def_ghi/file", "Qabc"),
    ],
)
def test_headers_and_links_are_hidden_whatever_they_hold(text: str, secret: str) -> None:
    assert secret not in redact(text)


def test_ordinary_text_stays() -> None:
    text = '{"event":"refused","route":"/api/v1/forward_backward","status":429,"model":"0123abc:train:0"}'
    assert redact(text) == text


def test_a_tenants_mark_is_stable_and_says_nothing_without_the_secret() -> None:
    assert tenant_mark("alice", b"1") == tenant_mark("alice", b"1") != tenant_mark("alice", b"2")
    assert tenant_mark("alice", b"1") != tenant_mark("bob", b"1")
    assert "alice" not in tenant_mark("alice", b"1")


@pytest.fixture
def lines():
    """Configure logging as the service does; return a function that reads the lines so far."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure(stream=stream)
    yield lambda: [orjson.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_every_library_writes_json_lines_without_secrets(lines) -> None:
    key = new_key()
    structlog.get_logger("ours").warning("refused", header={"X-API-Key": key}, count=3)
    logging.getLogger("theirs").error("key %s", key)
    try:
        raise ValueError(f"bad key {key}")
    except ValueError:
        logging.getLogger("theirs").exception("failed")
    logging.getLogger("uvicorn.error").info("Started server process")
    said = lines()
    assert [line["event"] for line in said] == ["refused", "key [hidden]", "failed"]
    assert said[0]["count"] == 3
    assert said[0]["logger"] == "ours"
    assert "ValueError: bad key [hidden]" in said[2]["exception"]
    assert key[4:] not in str(said)


def test_lines_carry_the_request_that_they_belong_to(lines) -> None:
    before = logs.REQUEST.set("r1")
    logging.getLogger("theirs").warning("inside")
    logs.REQUEST.reset(before)
    logging.getLogger("theirs").warning("outside")
    assert [line.get("request") for line in lines()] == ["r1", None]


def test_whose_a_line_is_stands_there_as_a_mark_or_not_at_all(lines, monkeypatch) -> None:
    monkeypatch.setattr(logs._tenants, "secret", None)
    structlog.get_logger("ours").warning("early", tenant="alice")
    logs.mark_tenants(b"s")
    structlog.get_logger("ours").warning("later", tenant="alice")
    structlog.get_logger("ours").warning("nobody's", tenant=None)
    assert [line.get("tenant") for line in lines()] == [None, tenant_mark("alice", b"s"), None]
    assert "alice" not in str(lines())


def test_a_flood_is_cut_off_and_counted(lines, monkeypatch) -> None:
    second = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: second)
    room = logs.LineLimiter("floods")
    assert [room.take() for _ in range(logs._LINES + 7)] == [True] * logs._LINES + [False] * 7
    second = 101.0
    assert room.take()
    assert [(line["event"], line["count"]) for line in lines()] == [("suppressed log lines about floods", 7)]

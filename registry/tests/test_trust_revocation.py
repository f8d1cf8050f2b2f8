"""A signed list takes code away: at the next load, and from a process that has it loaded already."""

import http.server
import json
import os
import socketserver
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import NotTrusted, Registry, SettingsError
from twinkle_registry.trust.editor import verify
from twinkle_registry.trust.folders import trust
from twinkle_registry.trust.policy import Policy
from twinkle_registry.trust.reference import Origin
from twinkle_registry.trust.revocation import RevocationList, Revoked, known_list, read_list, sign
from twinkle_registry.trust.signatures import new_private_key

House = Callable[..., Registry]
DAY = 86_400
FOCAL = "from house_contracts import Loss\nclass Focal(Loss):\n    def __call__(self, inputs): ...\n"
MANIFEST = """
schema = 1
core = ">=0.1,<1"
name = "acme-focal"
[[component]]
kind = "loss"
name = "Focal"
ref = ".:Focal"
"""
FILES = {"__init__.py": FOCAL, "twinkle-plugin.toml": MANIFEST}


@pytest.fixture(scope="module")
def key() -> tuple[bytes, str]:
    """A private key and the public one."""
    return new_private_key()


@pytest.fixture
def publish(key: tuple[bytes, str]) -> Callable[..., Path]:
    """Return a function that writes the list `revoked.json`, which the policy names."""

    def write(*revoked: Revoked, sequence: int = 1, days: int = 30, private: bytes = key[0]) -> Path:
        now = int(time.time())
        file = Path("revoked.json")
        file.write_bytes(sign(RevocationList(sequence, now, now + days * DAY, revoked), private))
        return file

    return write


@pytest.fixture
def policy(key: tuple[bytes, str]) -> Callable[..., None]:
    """Return a function that names a list in `twinkle.toml`."""

    def name(location: str = "revoked.json", stale: str = "warn", more: str = "") -> None:
        text = f'[trust]\n{more}\n[[trust.revoked]]\nlist = "{location}"\ned25519 = "{key[1]}"\nstale = "{stale}"\n'
        Path("twinkle.toml").write_text(text)

    return name


@pytest.fixture
def added(hub: Any, house: House, add: Any) -> str:
    """A commit of hf://acme/focal that somebody trusted."""
    commit: str = hub.push("acme/focal", FILES)
    add(house(), "hf://acme/focal")
    return commit


@pytest.mark.parametrize("by", ["commit", "pattern", "digest"])
def test_revoked_code_is_refused_at_the_next_load_with_the_reason(
    added: str, house: House, publish: Any, policy: Any, by: str
) -> None:
    from twinkle_registry.trust.lock import Lock

    assert house().resolve("hf://acme/focal", "loss").__name__ == "Focal"
    policy()
    code = {"commit": f"hf://acme/focal@{added}", "pattern": "hf://ACME/*", "digest": ""}[by]
    publish(Revoked(code, Lock.load().hub[0].digest if by == "digest" else "", "it reads ~/.ssh"))
    registry = house()
    for text in ("hf://acme/focal", "Focal"):
        with pytest.raises(
            NotTrusted, match=r"must not run any more: it was revoked: 'it reads ~/\.ssh' \(list number 1\)"
        ):
            registry.resolve(text, "loss")
    (checked,) = verify(registry.records, lambda scheme: None)
    assert "it was revoked" in checked.problem


def test_neither_allow_nor_a_copy_elsewhere_nor_the_switch_for_the_bold_helps(
    hub: Any, added: str, house: House, add: Any, publish: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinkle_registry.trust.lock import Lock

    publish(Revoked(f"hf://acme/focal@{added}", Lock.load().hub[0].digest, "bad"))
    policy(more='allow = ["*"]')
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    hub.push("copycat/focal", FILES)
    for asked in ("hf://copycat/focal", f"hf://acme/focal@{added}"):
        with pytest.raises(NotTrusted, match="it was revoked: 'bad'"):
            house().resolve(asked, "loss")
        with pytest.raises(NotTrusted, match="it was revoked: 'bad'"):
            add(house(), asked)
    hub.push("acme/focal", {**FILES, "__init__.py": FOCAL + "# mended\n"})
    add(house(), "hf://acme/focal")
    assert house().resolve("hf://acme/focal", "loss").__name__ == "Focal", "another commit is not revoked"


def test_a_running_process_drops_what_is_revoked(added: str, house: House, publish: Any, policy: Any) -> None:
    policy()
    publish()
    registry = house()
    spec = registry.find("Focal", "loss")
    assert registry.load(spec).__name__ == "Focal"
    assert registry.drop_forbidden(0.0) == ([], [])
    publish(Revoked(f"hf://acme/focal@{added}", "", "bad"), sequence=2)
    (dropped,), _ = registry.drop_forbidden(0.0)
    assert "it was revoked: 'bad'" in dropped.reason
    assert "Focal" not in registry.names("loss")
    for use in (lambda: registry.resolve("Focal", "loss"), lambda: registry.load(spec)):
        with pytest.raises(NotTrusted, match="it was revoked: 'bad'"):
            use()
    assert registry.drop_forbidden(0.0) == ([], [])


def test_a_list_that_was_not_signed_as_it_must_be_is_an_error_and_never_obeyed(
    added: str, house: House, publish: Any, policy: Any
) -> None:
    policy()
    good = publish(Revoked("hf://other/*", "", "bad")).read_bytes()
    assert house().resolve("hf://acme/focal", "loss").__name__ == "Focal"
    strangers, _ = new_private_key()
    envelope = json.loads(good)
    edited = {**envelope, "payload": json.loads(publish(sequence=9).read_bytes())["payload"]}
    for content in (
        publish(sequence=9, private=strangers).read_bytes(),
        json.dumps(edited).encode(),
        json.dumps({**envelope, "signatures": []}).encode(),
        b"{}",
        b"",
    ):
        Path("revoked.json").write_bytes(content)
        registry = house()
        with pytest.raises(NotTrusted, match=r"cannot determine whether code from a hub is revoked: .*revoked\.json"):
            registry.resolve("hf://acme/focal", "loss")
        dropped, (problem,) = registry.drop_forbidden(0.0)
        assert (dropped, "revoked.json" in problem) == ([], True)
        (known,) = Policy.load().revoked
        assert known.revocations is not None
        assert known.revocations.sequence == 1, "the last good list stays in effect"


def test_an_older_list_never_takes_the_place_of_a_newer_one(
    added: str, house: House, publish: Any, policy: Any
) -> None:
    policy()
    older = publish(sequence=1).read_bytes()
    publish(Revoked("hf://acme/focal", "", "bad"), sequence=2)
    with pytest.raises(NotTrusted, match="bad"):
        house().resolve("hf://acme/focal", "loss")
    Path("revoked.json").write_bytes(older)
    with (
        pytest.warns(
            UserWarning, match=r"has list number 1, which is older than number 2; the newer one stays in effect"
        ),
        pytest.raises(NotTrusted, match="bad"),
    ):
        house().resolve("hf://acme/focal", "loss")
    publish(sequence=2)
    with pytest.raises(NotTrusted, match="has a different list number 2 than the recorded one"):
        house().resolve("hf://acme/focal", "loss")


@pytest.mark.parametrize("state", ["expired", "missing"])
def test_a_stale_list_is_a_warning_or_by_policy_a_refusal(
    added: str, house: House, publish: Any, policy: Any, state: str
) -> None:
    if state == "expired":
        publish(days=-1)
    words = "has expired on" if state == "expired" else "cannot be read: No such file"
    policy()
    registry = house()
    with pytest.warns(UserWarning, match=f"revocation list: .*{words}"):
        assert registry.resolve("hf://acme/focal", "loss").__name__ == "Focal"
    policy(stale="refuse")
    with pytest.raises(NotTrusted, match=words):
        registry.resolve("hf://acme/focal", "loss")


@pytest.fixture
def web() -> Iterator[tuple[str, list[str]]]:
    """An address on loopback that serves the working directory, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/revoked.json", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_list_from_the_network_is_read_once_a_minute_and_kept_when_the_network_is_gone(
    added: str, house: House, publish: Any, policy: Any, web: tuple[str, list[str]]
) -> None:
    address, asked = web
    policy(address, stale="refuse")
    publish()
    for _ in range(2):
        assert house().resolve("hf://acme/focal", "loss").__name__ == "Focal"
    assert asked == ["/revoked.json"]
    publish(Revoked("hf://acme/focal", "", "bad"), sequence=2)
    (source,) = (known.source for known in Policy.load().revoked)
    assert known_list(source, fetch=False).revocations == known_list(source, fetch=True).revocations
    assert asked == ["/revoked.json"]
    known = known_list(source, fetch=True, max_age=0.0)
    assert known.revocations is not None
    assert (known.revocations.sequence, known.problem) == (2, "")
    Path("revoked.json").unlink()
    gone = known_list(source, fetch=True, max_age=0.0)
    assert gone.revocations == known.revocations
    assert "cannot be read: Not Found; the list number 2 of " in gone.problem or "File not found" in gone.problem
    policy(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotTrusted, match="bad"):
            house().resolve("hf://acme/focal", "loss")


def test_a_list_that_a_folder_names_is_not_asked_for_until_the_folder_is_trusted(
    policy: Any, web: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWINKLE_TRUST_FOLDER")
    policy(web[0])
    assert Policy.load(fetch=True).revoked == ()
    assert web[1] == []


def test_an_edit_of_the_settings_does_not_lift_what_is_revoked(
    added: str, house: House, publish: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWINKLE_TRUST_FOLDER")
    policy()
    publish(Revoked("hf://acme/focal", "", "bad"))
    for name in ("twinkle.toml", "twinkle.lock"):
        trust(name, [Path(name).read_bytes()])
    with pytest.raises(NotTrusted, match="it was revoked: 'bad'"):
        house().resolve("hf://acme/focal", "loss")
    policy(more="# an edit that nobody has trusted yet")
    publish(sequence=2)
    with pytest.warns(UserWarning, match=r"^\[trust\] revoked of twinkle\.toml in .* is ignored"):
        registry = house()
    with (
        pytest.warns(
            UserWarning, match=r"is not read, because .* not trusted any more; the list number 1 .* stays in effect"
        ),
        pytest.raises(NotTrusted, match="it was revoked: 'bad'"),
    ):
        registry.resolve("hf://acme/focal", "loss")
    trust("twinkle.toml", [Path("twinkle.toml").read_bytes()])
    assert house().resolve("hf://acme/focal", "loss").__name__ == "Focal"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Return a function that gives an address on loopback which answers one request with some bytes."""
    threads: list[threading.Thread] = []

    def serve(answer: bytes) -> str:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.recv(65_536)
                self.request.sendall(answer)

        server = socketserver.TCPServer(("127.0.0.1", 0), Handler)

        def once() -> None:
            with server:
                server.timeout = 60
                server.handle_request()

        threads.append(threading.Thread(target=once))
        threads[-1].start()
        return f"http://127.0.0.1:{server.server_address[1]}/revoked.json"

    yield serve
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc"]
)
def test_an_address_that_speaks_no_http_is_one_that_cannot_be_reached(
    added: str, house: House, policy: Any, answering: Callable[[bytes], str], answer: bytes
) -> None:
    policy(answering(answer))
    with pytest.warns(UserWarning, match=r"revocation list: http://127\.0\.0\.1:\d+/revoked\.json cannot be read: "):
        assert house().resolve("hf://acme/focal", "loss").__name__ == "Focal"


def test_threads_that_read_a_list_at_once_keep_it(key: tuple[bytes, str], publish: Any, policy: Any) -> None:
    policy()
    publish(Revoked("hf://acme/focal", "", "bad"))
    (source,) = (known.source for known in Policy.load().revoked)
    problems: set[str] = set()

    def read() -> None:
        for _ in range(40):
            known = known_list(source, fetch=True)
            problems.update(filter(None, (known.problem, known.error)))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == set()


@pytest.mark.timeout(60)  # a reader that waits for the pipe would wait for ever
def test_a_list_that_is_no_regular_file_is_not_opened(added: str, house: House, policy: Any) -> None:
    os.mkfifo("revoked.json")
    policy(stale="refuse")
    with pytest.raises(NotTrusted, match=r"revoked\.json cannot be read: it is a pipe, not a regular file"):
        house().resolve("hf://acme/focal", "loss")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('list = "x"', "an ed25519 public key must be 32 bytes in base64, got None"),
        ('ed25519 = "x"', "list must be a path or an address of a signed list, got None"),
        ('list = "ftp://x"', "list must be a path, or begin with file://, https:// or http://, got 'ftp://x'"),
        ('list = "x"\nstale = "maybe"', "stale must be 'warn' or 'refuse', got 'maybe'"),
        ('list = "x"\nkey = "x"', "key: unknown key"),
    ],
)
def test_settings_that_are_wrong_are_told(table: str, words: str) -> None:
    Path("twinkle.toml").write_text(f"[[trust.revoked]]\n{table}\n")
    with pytest.raises(SettingsError, match=words):
        Policy.load()


def test_what_is_signed_is_read_again_and_an_entry_without_a_reason_is_none(key: tuple[bytes, str]) -> None:
    import base64

    public = base64.b64decode(key[1])
    made = RevocationList(3, 10, 20, (Revoked("hf://a/b", "", "why \u202e"), Revoked("", "0" * 64, "x")))
    assert read_list(sign(made, key[0]), [public], where="it") == made
    assert made.why(Origin("hf", "x/y", "3f" * 20), "0" * 32) == "x"
    for entry in (Revoked("hf://a/b"), Revoked("no pattern", "", "x"), Revoked("", "abc", "x"), Revoked("", "", "x")):
        with pytest.raises(NotTrusted, match="it is signed, but cannot be read"):
            read_list(sign(RevocationList(1, 1, 1, (entry,)), key[0]), [public], where="it")

"""Notifiers in core: how one travels as plain data, and that people hear of each failure once."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import torchrun
from receivers import Web, web

import twinkle
from twinkle import Run
from twinkle.errors import ArgumentError, ComponentNotFound, DataError, RankError, SettingsError
from twinkle.notifier import Notifier, notify_exception, secrets_of
from twinkle_notifiers import failures
from twinkle_notifiers.message import FRAMES
from twinkle_notifiers.sources import build_notifiers, notifiers_of_environment, to_environment


class Kept(Notifier):
    """Keeps what it is told."""

    def __init__(self, token: str = "t0p-secret", places: Any = None) -> None:
        self.token, self.places = token, places
        self.heard: list[str] = []

    def __call__(self, message: str) -> None:
        self.heard.append(message)

    def to_dict(self) -> dict[str, Any]:
        return {"token": self.token, "places": self.places}


class Rude(Kept):
    """Raises, with its secret in the text."""

    def __call__(self, message: str) -> None:
        raise ValueError(self.token)


@pytest.fixture(autouse=True)
def listening_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("no_proxy", "*")
    yield
    failures.watch([], None)


def wait() -> None:
    current = failures._watch
    assert current is not None
    current.wait()


# As plain data


def test_a_notifier_is_built_again_by_the_name_of_its_class() -> None:
    plain = {"type": f"{__name__}:Kept", "token": "t0p-secret", "places": ["a"]}
    sys.modules.setdefault(__name__, sys.modules[Kept.__module__])
    again = Notifier.from_dict(plain)
    assert type(again).__name__ == "Kept"
    assert again.to_dict() == {"token": "t0p-secret", "places": ["a"]}
    assert plain["type"]  # the dict is left as it was


def test_its_own_class_needs_no_type() -> None:
    assert Kept.from_dict({"token": "x"}).token == "x"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"url": "https://t0p"}, "needs the key 'type'.*it has none"),
        ({"type": 3}, "found int"),
        ([], "takes what to_dict returns, a dict; found list"),
        ({"type": "SlackNotifier", "uri": "https://t0p"}, "unknown argument 'uri', nearest: 'url'"),
        ({"type": "SlackNotifier"}, "missing argument 'url'"),
    ],
)
def test_plain_data_that_is_no_notifier_is_refused_without_its_values(values: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        Notifier.from_dict(values)
    assert "t0p" not in str(caught.value)


def test_a_class_builds_no_other_class() -> None:
    with pytest.raises(ArgumentError, match=r"'SlackNotifier' is not a class that Kept.from_dict can build"):
        Kept.from_dict({"type": "SlackNotifier", "url": "https://h/x"})


def test_a_misspelt_type_names_the_nearest() -> None:
    with pytest.raises(ComponentNotFound, match="SlackNotifier"):
        Notifier.from_dict({"type": "SlakNotifier"})


def test_repr_masks_what_is_secret_by_name_at_any_depth() -> None:
    notifier = Kept(places=["a", "b"])
    assert repr(notifier) == "Kept(token='***', places=['a', 'b'])"
    deep = Kept(token="", places={"api_key": "k3y", "room": "b"})
    assert repr(deep) == "Kept(token='', places={'api_key': '***', 'room': 'b'})"


def test_the_long_parts_of_an_address_are_secrets_too() -> None:
    notifier = Kept(token="https://host.example/a/bot123456789012?key=abcdefghijkl&x=1")
    assert secrets_of(notifier) == [notifier.token, "bot123456789012", "abcdefghijkl"]


def test_an_argument_may_be_an_instance_a_class_a_text_a_dict_or_several() -> None:
    kept = Kept()
    slack = {"type": "SlackNotifier", "url": "https://h/x"}
    found = build_notifiers([kept, Kept, slack, "twinkle_core_absent:X"][:3])
    assert found[0] is kept
    assert [type(one).__name__ for one in found] == ["Kept", "Kept", "SlackNotifier"]
    assert build_notifiers(None) == build_notifiers([]) == []
    with pytest.raises(ArgumentError, match="remove it"):
        build_notifiers([None])
    with pytest.raises(ArgumentError, match="missing argument 'url'"):
        build_notifiers("SlackNotifier")


def test_notifiers_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    slack, ding = build_notifiers(
        [{"type": "SlackNotifier", "url": "https://h/x"}, {"type": "DingNotifier", "ding_url": "https://h/y"}]
    )
    monkeypatch.setenv("TWINKLE_NOTIFIER", to_environment([slack, ding]))
    assert [one.to_dict() for one in notifiers_of_environment()] == [slack.to_dict(), ding.to_dict()]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{t0p", "is not JSON; write for example"),
        ('"t0p"', "something else than JSON objects"),
        ('[["t0p"]]', "something else than JSON objects"),
        ('{"url": "t0p"}', "needs the key 'type'"),
        ('{"type": "SlackNotifier", "url": "t0p"}', "must begin with https://"),
    ],
)
def test_an_environment_that_cannot_be_read_is_an_error_without_its_text(
    text: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TWINKLE_NOTIFIER", text)
    for call in (twinkle.initialize, lambda: Run("trial", root=tmp_path)):
        with pytest.raises(SettingsError, match=told) as caught:
            call()  # type: ignore[operator]
        assert "t0p" not in str(caught.value) + repr(caught.value.__cause__)


def test_initialize_takes_several_and_keeps_them() -> None:
    one, two = Kept(), Kept()
    twinkle.initialize(notifier=[one, two])
    assert twinkle.runtime.current_runtime().options.notifier == (one, two)
    twinkle.initialize(notifier=[])
    assert failures._watch is None


# What people are told


def test_the_message_says_what_where_and_how() -> None:
    kept = Kept()
    try:
        raise ValueError("the disk is full")
    except ValueError as error:
        notify_exception(kept, "while saving", error, name="trial")
    (text,) = kept.heard
    lines = text.splitlines()
    assert lines[:3] == ["Twinkle: trial failed", "ValueError: the disk is full", "while saving"]
    assert f"process {os.getpid()}" in lines[3]
    assert 'raise ValueError("the disk is full")' in text


def test_an_error_of_ours_is_told_once_and_without_its_traceback() -> None:
    kept = Kept()
    try:
        raise DataError("rows.jsonl: line 3 is no JSON") from ValueError("a cause")
    except DataError as error:
        notify_exception(kept, "while reading", error, name="trial")
    (text,) = kept.heard
    assert text.count("rows.jsonl: line 3 is no JSON") == 1
    assert "Traceback" not in text
    assert len(text.splitlines()) == 4


def test_the_message_hides_the_notifiers_own_secrets() -> None:
    kept = Kept()
    notify_exception(kept, "", ValueError("no answer from t0p-secret"))
    assert "ValueError: no answer from ***" in kept.heard[0]
    assert "t0p-secret" not in kept.heard[0]


def test_a_long_error_and_a_deep_one_stay_readable() -> None:
    def deep(depth: int) -> None:
        if depth % 2:
            deep(depth - 1)
        elif depth:
            deep(int(depth) - 1)
        else:
            raise ValueError("y" * 5000)

    kept = Kept()
    try:
        deep(200)
    except ValueError as error:
        notify_exception(kept, "", error)
    assert len(kept.heard[0].splitlines()[1]) < 1100
    assert kept.heard[0].count("  File ") == FRAMES


def test_of_one_exception_people_are_told_once() -> None:
    kept, error = Kept(), ValueError("no")
    for _ in range(3):
        notify_exception([kept], "", error)
    assert len(kept.heard) == 1


def test_exceptions_that_forbid_attributes_are_told_too() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

    kept, error = Kept(), Frozen()
    notify_exception(kept, "", error)
    notify_exception(kept, "", error)
    assert len(kept.heard) == 1


def test_a_notifier_that_raises_keeps_none_of_the_others_from_it(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    with caplog.at_level(logging.ERROR, logger="twinkle"):
        notify_exception([Rude(), kept, Rude()], "", ValueError("no"))
    assert len(kept.heard) == 1
    assert caplog.messages == ["a message about the failed run is lost: Rude raised ValueError"] * 2


# When they are told


def fail(root: Path, error: BaseException) -> None:
    def work() -> None:
        with Run("trial", root=root) as run:
            run.log({"loss": 1.0}, step=7)
            raise error

    with pytest.raises(type(error)):
        work()


def test_a_run_that_fails_is_told_once_with_its_folder_and_step(tmp_path: Path) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept)
    error = ValueError("no")
    fail(tmp_path, error)
    sys.excepthook(ValueError, error, None)  # nobody caught it either
    wait()
    (text,) = kept.heard
    assert text.startswith("Twinkle: trial failed\nValueError: no\nrun ")
    assert re.search(rf"^run {re.escape(str(tmp_path))}/trial-[\d-]+, after step 7$", text, re.MULTILINE)


def test_the_name_of_initialize_goes_before_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept, name="grand trial")
    fail(tmp_path, ValueError("no"))
    wait()
    monkeypatch.setenv("TWINKLE_NAME", "from outside")
    twinkle.initialize(notifier=kept)
    fail(tmp_path, ValueError("no"))
    wait()
    assert [text.splitlines()[0] for text in kept.heard] == [
        "Twinkle: grand trial failed",
        "Twinkle: from outside failed",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_whoever_stops_a_run_is_not_told_of_it(error: BaseException, tmp_path: Path) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept)
    fail(tmp_path, error)
    wait()
    assert kept.heard == []


def test_a_run_that_ends_well_is_not_told(tmp_path: Path) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept)
    with Run("trial", root=tmp_path):
        pass
    wait()
    assert kept.heard == []


def test_an_error_raised_from_a_told_one_is_no_second_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, first = Kept(), ValueError("no")
    twinkle.initialize(notifier=kept)
    fail(tmp_path, first)
    second = RuntimeError("and so the script fails")
    second.__context__ = first
    monkeypatch.setattr(failures._watch, "_before", lambda *_: None)
    sys.excepthook(RuntimeError, second, None)
    wait()
    assert len(kept.heard) == 1


def test_each_failed_run_is_told_even_one_that_begins_while_another_is_handled(tmp_path: Path) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept)
    fail(tmp_path, ValueError("first"))
    later = ValueError("second")
    later.__context__ = KeyError("of no run")
    fail(tmp_path, later)
    wait()
    assert sorted(text.splitlines()[1] for text in kept.heard) == ["ValueError: first", "ValueError: second"]


def test_a_second_initialize_replaces_whoever_was_told(tmp_path: Path) -> None:
    hook = sys.excepthook
    old, new = Kept(), Kept()
    twinkle.initialize(notifier=old)
    twinkle.initialize(notifier=new)
    fail(tmp_path, ValueError("no"))
    wait()
    assert (len(old.heard), len(new.heard)) == (0, 1)
    twinkle.initialize()
    assert sys.excepthook is hook


def test_a_hook_that_was_put_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    twinkle.initialize(notifier=Kept())
    mine = failures._watch._hook  # type: ignore[union-attr]
    called: list[Any] = []
    monkeypatch.setattr(failures._watch, "_before", lambda *_: called.append("python"))

    def over(kind: Any, error: Any, trace: Any) -> None:
        called.append("over")
        mine(kind, error, trace)

    monkeypatch.setattr(sys, "excepthook", over)
    twinkle.initialize()
    assert sys.excepthook is over
    sys.excepthook(ValueError, ValueError("no"), None)
    assert called == ["over", "python"]


def test_a_slow_notifier_holds_nothing_up(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(Kept):
        def __call__(self, message: str) -> None:
            release.wait(30)
            super().__call__(message)

    slow = Slow()
    twinkle.initialize(notifier=slow)
    fail(tmp_path, ValueError("no"))  # returns while the message is under way
    current = failures._watch
    assert current is not None
    current.wait(0.01)
    assert slow.heard == []
    release.set()
    current.wait()
    assert len(slow.heard) == 1


def test_whoever_stops_a_script_is_not_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept)
    seen: list[Any] = []
    monkeypatch.setattr(failures._watch, "_before", lambda kind, *_: seen.append(kind))
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    wait()
    assert (kept.heard, seen) == ([], [KeyboardInterrupt])


def test_a_forked_child_leaves_the_telling_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    twinkle.initialize(notifier=kept)
    monkeypatch.setattr(failures._watch, "_before", lambda *_: None)
    monkeypatch.setattr(failures._watch, "_process", os.getpid() + 1)
    sys.excepthook(ValueError, ValueError("no"), None)
    assert kept.heard == []


# Whole processes


@pytest.fixture
def receiver() -> Iterator[Web]:
    with web() as found:
        found.answer((200, "ok"))
        yield found


def environment(receiver: Web, **more: str) -> dict[str, str]:
    plain = {"type": "SlackNotifier", "url": f"{receiver.address}/T0PSECRET123456", **more}
    return {"TWINKLE_NOTIFIER": json.dumps(plain), "no_proxy": "*", "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=os.environ | more, capture_output=True, text=True, check=False
    )


def told(receiver: Web) -> list[str]:
    return [request.body["text"] for request in receiver.requests]


@pytest.mark.full
def test_a_script_that_fails_outside_of_a_run_is_told_before_it_ends(receiver: Web, tmp_path: Path) -> None:
    code = """
    import sys, twinkle
    twinkle.initialize(name="nightly", notifier={"type": "SlackNotifier", "url": sys.argv[0] and ADDRESS})
    raise ValueError("no data")
    """
    code = f"ADDRESS = {receiver.address + '/T0PSECRET123456'!r}\n" + textwrap.dedent(code)
    done = run(tmp_path, code, no_proxy="*")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no data")
    (text,) = told(receiver)
    assert text.startswith("Twinkle: nightly failed\nValueError: no data\nscript ")
    assert "T0PSECRET" not in text + done.stdout + done.stderr


def test_a_run_without_initialize_is_told_through_the_environment(receiver: Web, tmp_path: Path) -> None:
    code = "from twinkle import Run\nwith Run('trial') as run:\n    raise ValueError('no')\n"
    done = run(tmp_path, code, **environment(receiver))
    assert done.returncode == 1
    (text,) = told(receiver)
    assert text.startswith("Twinkle: trial failed\nValueError: no\nrun runs/trial-")


@pytest.mark.full
def test_the_end_of_the_process_waits_for_a_service_but_not_for_ever(tmp_path: Path) -> None:
    code = """
    import threading, time, twinkle
    from twinkle.notifier import Notifier
    from twinkle_notifiers import failures
    failures.PATIENCE = 0.3
    failures.Watch.wait.__defaults__ = (0.3,)

    class Never(Notifier):
        def __call__(self, message):
            threading.Event().wait()

        def to_dict(self):
            return {}

    twinkle.initialize(notifier=Never())
    raise ValueError("no")
    """
    done = run(tmp_path, code)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no")


BOTH = "raise ValueError(f'no data on rank {rank}')"
ONE_FOLLOWS = """
from twinkle.errors import RankError
raise RankError('rank 1 left') if rank == 0 else ValueError('cause')
"""
ONE = "if rank == 1:\n    raise ValueError('cause')\ntime.sleep(60)"
BOTH_IN_A_RUN = "from twinkle import Run\nwith Run('trial'):\n    raise ValueError('cause')"
ONE_IN_A_RUN = """
from twinkle import Run
with Run('trial'):
    if rank == 1:
        raise ValueError('cause')
    time.sleep(60)
"""
SOAK = pytest.mark.soak


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "first"),
    [
        pytest.param(BOTH, "no data on rank ", marks=SOAK),
        pytest.param(ONE_FOLLOWS, "cause"),
        pytest.param(ONE, "cause", marks=SOAK),
        pytest.param(BOTH_IN_A_RUN, "cause", marks=SOAK),
        pytest.param(ONE_IN_A_RUN, "cause"),
    ],
    ids=["both", "one follows", "one", "both in a run", "one in a run"],
)
def test_of_several_ranks_one_tells(code: str, first: str, receiver: Web, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    begin = "import time, twinkle\nfrom twinkle.platform import Platform\ntwinkle.initialize()\n"
    script.write_text(f"{begin}rank = Platform.get_rank()\n{code}")
    more = environment(receiver) | {"TWINKLE_CACHE_DIR": str(tmp_path / "cache"), "TWINKLE_NAME": "pair"}
    done = torchrun(script, ranks=2, environment=more, timeout=120)
    assert done.returncode != 0
    assert len(told(receiver)) == 1, done.stderr
    assert told(receiver)[0].startswith("Twinkle: pair failed")
    assert told(receiver)[0].splitlines()[1].startswith(f"ValueError: {first}")
    assert "of 2, " in told(receiver)[0]


def test_ranks_wait_for_the_one_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_notifiers.claims import Claim

    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TWINKLE_CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    first, second = Claim(1), Claim(1)
    assert (first.won, second.won) == (True, False)
    began = time.monotonic()
    second.wait(0.2)
    assert time.monotonic() - began >= 0.2
    first.settle()
    second.wait(60)
    assert Claim(2).won  # another failure


def test_where_nothing_can_be_written_every_rank_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_notifiers.claims import Claim

    (tmp_path / "file").write_text("")
    for name, value in {"WORLD_SIZE": "2", "TWINKLE_CACHE_DIR": str(tmp_path / "file")}.items():
        monkeypatch.setenv(name, value)
    assert Claim(1).won
    assert Claim(1).won


def test_a_rank_error_lets_the_cause_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failures.time, "sleep", waited.append)
    notify_exception(Kept(), "", RankError("rank 1 left"))
    notify_exception(Kept(), "", ValueError("cause"))
    assert waited == [failures._FOLLOWER_WAITS]

"""Formulas: what is equal, what is not, what is hostile, and that a comparison can be ended from any thread."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import ArgumentError, DataError, RequirementMissing
from twinkle_rewards import mathematics
from twinkle_rewards.mathematics import MathReward
from twinkle_rewards.olympiad import OlympiadBenchAccuracyReward, parts
from twinkle_rewards.worker import Worker, WorkerBroken, WorkerError


def row(said: str, truth: Any, key: str = "solution") -> Any:
    return {"messages": [{"role": "assistant", "content": said}], "user_data": [(key, json.dumps(truth))]}


EQUAL = [
    ("\\frac{1}{2}", "0.5", 1),
    ("0.5", "\\dfrac12", 1),
    ("x^2 + 2x + 1", "(x+1)^2", 1),
    ("\\{2, 1\\}", "\\{1,2\\}", 1),
    ("(1, 2)", "(2, 1)", 0),
    ("\\text{East}", "east", 1),
    ("\\sqrt{8}", "2\\sqrt{2}", 1),
    ("300000", "3 \\times 10^5", 1),
    ("3 \\times 10^{5}", "300000", 1),
    ("12", "68", 0),
    ("68\\text{ cm}^2", "68", 1),
    ("68^\\circ", "68", 1),
    ("23+45", "68", 0),
    ("23\\,+\\quad 45", "68", 0),
    ("23--45", "68", 0),
    ("34×2", "68", 0),
    ("23\\text{ cm}+45", "68", 0),
    ("34 \\times 2", "68", 0),
    ("2^{10}", "1024", 0),
    ("68 \\text{ or } 67", "68", 0),
    ("\\frac{", "68", 0),
]


@pytest.mark.full
def test_equal_is_what_mathematics_calls_so_and_nothing_may_be_left_to_compute() -> None:
    reward = MathReward(time_limit=60)
    rows = [row(f"Hence \\boxed{{{said}}}.", f"It is \\boxed{{{truth}}}.") for said, truth, _ in EQUAL]
    found = reward(rows)
    assert {pair[:2]: one for pair, one in zip(EQUAL, found, strict=True)} == {pair[:2]: pair[2] for pair in EQUAL}


def test_only_the_last_box_counts_and_a_truth_needs_none() -> None:
    reward = MathReward(ground_truth_key="answer")
    rows = [("\\boxed{1} no, \\boxed{2}", "2"), ("\\boxed{2} no, \\boxed{1}", "2"), ("2", "2"), ("\\boxed{}", "2")]
    assert reward([row(*one, key="answer") for one in rows]) == [1.0, 0.0, 0.0, 0.0]
    assert reward([row("\\boxed{2}", "")], ground_truths=["so \\boxed{2}"]) == [1.0]
    with pytest.raises(DataError, match="row 0 has no 'solution'"):
        MathReward()([row("\\boxed{2}", "2", key="answer")])


@pytest.mark.full
def test_hostile_formulas_earn_nothing_within_their_time_in_any_thread() -> None:
    hostile = ["9^{9^{9^{9}}}", "\\frac{" * 80 + "1" + "}" * 80, "(" * 499, "x" * 1_000_000]
    found: list[Any] = []

    def score() -> None:
        found.append(MathReward(time_limit=0.5)([row(f"\\boxed{{{text}}}", "x+1") for text in hostile]))
        found.append(MathReward(time_limit=60)([row("\\boxed{1+x}", "x+1")]))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(120)
    assert found == [[0.0] * 4, [1.0]]


def test_a_comparison_that_is_late_earns_nothing_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics.symbolic, "equal", time.sleep)
    worker = Worker()
    monkeypatch.setattr(mathematics, "_worker", lambda: worker)
    monkeypatch.setattr(
        worker, "call", lambda function, truth, said, seconds: Worker.call(worker, time.sleep, 60, seconds=0.2)
    )
    assert MathReward()([row("\\boxed{late}", "other")]) == [0.0]
    worker.close()


def test_parts_of_an_answer_count_once_each_and_guesses_cost() -> None:
    reward = OlympiadBenchAccuracyReward(time_limit=60)
    cases = [
        ("2, 3", "3, 2", 1),
        ("2", "2,3", 0.5),
        ("2, 2", "2,3", 0.5),
        ("2, 3", "2,2", 0.5),
        ("1, 2, 3, 4", "2,3", 0.5),
        ("", "2", 0),
    ]
    found = reward([row(f"\\boxed{{{said}}}", truth, "ground_truth") for said, truth, _ in cases])
    assert found == [expected for *_, expected in cases]
    assert reward([row("\\boxed{0.5, 7}", ["\\frac12", "7"], "ground_truth")]) == [1.0]


def test_many_hostile_parts_have_no_more_time_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def late(said: str, truth: str, seconds: float) -> bool:
        asked.append(said)
        time.sleep(seconds)
        return False

    monkeypatch.setattr("twinkle_rewards.olympiad.equal", late)
    said = ", ".join(f"9^{{{number}}}" for number in range(30))
    assert OlympiadBenchAccuracyReward(time_limit=0.05)([row(f"\\boxed{{{said}}}", "2, 3", "ground_truth")]) == [0.0]
    assert len(asked) == 1


def test_commas_in_brackets_and_thousands_do_not_part() -> None:
    assert parts("(1, 2), [3, 4)，5; 1,234、\\{6,7\\}") == ["(1, 2)", "[3, 4)", "5", "1,234", "\\{6,7\\}"]
    assert parts("(1, 2), 1,234; f(x, y)") == ["(1, 2)", "1,234", "f(x, y)"]
    assert parts("x=1, y=2") == ["x=1", "y=2"]


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics.importlib.util, "find_spec", lambda name: None)
    for cls in (MathReward, OlympiadBenchAccuracyReward):
        with pytest.raises(RequirementMissing, match=f"{cls.__name__} compares .* pip install 'math-verify"):
            cls()


def test_options_outside_their_range_are_refused() -> None:
    for options in ({"time_limit": 0}, {"time_limit": None}, {"ground_truth_key": 1}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            MathReward(**options)  # type: ignore[arg-type]


def test_a_worker_answers_raises_ends_late_calls_and_goes_on() -> None:
    worker = Worker()
    first = worker.call(os.getpid, seconds=60)
    assert first not in (os.getpid(), None)
    assert worker.call(print, "this is no answer", seconds=60) is None
    with pytest.raises(WorkerError, match="ValueError: math domain error"):
        worker.call(__import__("math").sqrt, -1, seconds=60)
    assert worker.call(os.getpid, seconds=60) == first
    with pytest.raises(TimeoutError, match="it took longer"):
        worker.call(pow, 9, 9**9, seconds=0.3)  # in C, which no signal ends
    with pytest.raises(WorkerError, match="ended with code 3"):
        worker.call(os._exit, 3, seconds=60)
    with pytest.raises(WorkerError, match="cannot be sent"):
        worker.call(lambda: 1, seconds=60)
    assert worker.call(os.getpid, seconds=60) != first
    kept = weakref.ref(worker._process)  # type: ignore[arg-type]
    worker.close()
    gc.collect()  # tracebacks of the errors above refer to frames, and these to the process
    assert kept() is None  # nothing is left of a process that was ended


@pytest.mark.full
def test_a_worker_whose_parent_was_killed_ends_itself_even_while_it_computes_in_c() -> None:
    script = (
        "import os, threading\nfrom twinkle_rewards.worker import Worker\nworker = Worker()\n"
        "print(worker.call(os.getpid, seconds=60), flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()\nworker.call(pow, 9, 9**9, seconds=0.5)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -9
    end = time.monotonic() + 60
    while alive(int(killed.stdout)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(int(killed.stdout))


def alive(process: int) -> bool:
    """Say whether a process runs; one that ended and that nobody waits for does not."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_worker_has_no_more_memory_than_it_may() -> None:
    worker = Worker(memory=1 << 30)
    with pytest.raises(WorkerError, match="MemoryError"):
        worker.call(bytes, 4 << 30, seconds=60)
    assert worker.call(len, b"abc", seconds=60) == 3
    worker.close()


def test_a_worker_that_cannot_start_is_an_error_and_not_a_wrong_answer() -> None:
    worker = Worker(prepare=os.abort)
    with pytest.raises(WorkerBroken, match="cannot start"):
        worker.call(len, b"abc", seconds=60)

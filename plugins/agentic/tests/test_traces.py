"""Traces: one readable file a trajectory, whole or not at all, and no trace ever ends a run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from twinkle.template import Template
from twinkle.testing import tiny_tokenizer
from twinkle_agentic.examples import ScriptedAPI, ScriptedSampler
from twinkle_agentic.rollout import APIMultiTurnRollout, MultiTurnRollout, traces
from twinkle_agentic.tools import CalculatorTool, ToolManager

TEMPLATE = Template(tokenizer=tiny_tokenizer())
SUM = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'


def rollout(**options: Any) -> MultiTurnRollout:
    return MultiTurnRollout(
        ScriptedSampler([SUM, "```\n5\n```"], TEMPLATE), None, ToolManager([CalculatorTool()]), **options
    )


def ask(*texts: str) -> list[Any]:
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def test_a_trace_can_be_read_from_top_to_bottom(tmp_path: Path) -> None:
    rollout(trace_dir=tmp_path / "new" / "traces", success_callback=lambda row: "5" in row["messages"][-1]["content"])(
        ask("2 + 3?"), global_step=12
    )
    (file,) = (tmp_path / "new" / "traces").iterdir()
    assert file.name == "step-000012-0000.md"
    tokens = len(TEMPLATE.tokenizer(SUM)["input_ids"]) + 1
    assert file.read_text("utf-8") == (
        "# Trajectory 0 of step 12\n\n## user\n\n```text\n2 + 3?\n```\n\n"
        f"## Turn 1 (stop, {tokens} tokens)\n\n```text\n{SUM}\n```\n\n"
        'Calls `calculator`:\n\n```text\n{"expression": "2 + 3"}\n```\n\nResult:\n\n```text\n5\n```\n\n'
        "## Turn 2 (stop, 10 tokens)\n\n````text\n```\n5\n```\n````\n\n**Ended: stop**\n\nsuccess: True\n"
    )


def test_without_a_step_the_calls_are_counted(tmp_path: Path) -> None:
    made = rollout(trace_dir=str(tmp_path))
    made(ask("a", "b"))
    made(ask("a"))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "step-000001-0000.md",
        "step-000001-0001.md",
        "step-000002-0000.md",
    ]


def test_calls_in_the_prompt_are_shown_too(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    example = [{"role": "user", "content": "1 + 2?"}, called, {"role": "tool", "content": "3"}]
    rollout(trace_dir=tmp_path)([{"messages": [*example, {"role": "user", "content": "2 + 3?"}]}])
    (file,) = tmp_path.iterdir()
    assert 'Calls `add`:\n\n```text\n{"a": 1}\n```\n\n## tool\n' in file.read_text("utf-8")


def test_several_processes_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        rollout(trace_dir=tmp_path)(ask("a"), global_step=3)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["step-000003-rank0-0000.md", "step-000003-rank1-0000.md"]


def test_a_callback_gets_what_the_file_says_as_plain_data() -> None:
    seen: list[dict[str, Any]] = []
    found: Any = rollout(trace_callback=seen.append, success_callback=lambda row: row["turns"] == 2)(
        ask("a", "b"), global_step=1
    )
    assert [trace["trajectory"] for trace in seen] == [0, 1]
    assert json.loads(json.dumps(seen)) == seen
    assert seen[0]["turns"][0]["results"] == ["5"]
    assert seen[0]["turns"][0]["tool_calls"][0]["function"]["name"] == "calculator"
    assert (seen[0]["stop_reason"], seen[0]["truncated"], seen[0]["success"]) == ("stop", False, True)
    assert found[0]["success"] is True


def test_what_fails_in_a_trace_is_logged_and_the_rollout_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(logging.getLogger("twinkle"), "propagate", True)

    def fails(value: Any) -> Any:
        raise KeyError("no such row")

    found: Any = rollout(trace_dir=tmp_path / "taken", trace_callback=fails, success_callback=fails)(ask("a"))
    assert found[0]["success"] is None
    assert found[0]["stop_reason"] == "stop"
    assert caplog.text.count("a trace of a rollout is lost: KeyError: 'no such row'") == 2
    assert "taken" in caplog.text


def test_a_call_that_is_nested_too_deeply_for_a_trace_ends_no_rollout(tmp_path: Path) -> None:
    class Deep(ScriptedAPI):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            arguments: dict[str, Any] = {}
            for _ in range(100_000):
                arguments = {"a": arguments}
            return {"content": "", "tool_calls": [{"function": {"name": "calculator", "arguments": arguments}}]}

    deep = APIMultiTurnRollout(Deep([]), ToolManager([CalculatorTool()]), max_turns=1, trace_dir=tmp_path)
    assert deep(ask("a"))[0]["stop_reason"] == "max_turns"  # type: ignore[typeddict-item]


def test_a_file_that_was_not_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout(trace_dir=tmp_path)(ask("a"), global_step=1)
    before = (tmp_path / "step-000001-0000.md").read_text("utf-8")

    def half(self: Path, text: str, *args: Any, **kwargs: Any) -> None:
        self.write_bytes(text.encode()[:20])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half)
    rollout(trace_dir=tmp_path)(ask("another"), global_step=1)
    (file,) = tmp_path.iterdir()
    assert file.read_text("utf-8") == before


def test_text_that_is_no_unicode_is_written_with_marks_in_its_place(tmp_path: Path) -> None:
    trace = {"trajectory": 0, "step": 1, "messages": [{"role": "user", "content": "a\ud800"}], "turns": []}
    traces._write(tmp_path / "one.md", {**trace, "stop_reason": "stop", "truncated": True})
    text = (tmp_path / "one.md").read_text("utf-8")
    assert "a?" in text
    assert text.endswith("**Ended: stop** (truncated)\n")

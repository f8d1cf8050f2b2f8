"""The checklist is complete, and every line of it has a test."""

import runpy
from typing import Any

import pytest
from house import ROOT


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "tables.py"))


def test_the_checklist_has_115_lines_in_order(tables: dict[str, Any]) -> None:
    lines = [line for _, lines in tables["checklist"]() for line in lines]
    assert [number for number, _, _ in lines] == list(range(1, 116))
    assert {duty for _, duty, _ in lines} == {"M", "S"}


def test_every_line_has_a_test_and_every_test_a_line(tables: dict[str, Any]) -> None:
    shown = tables["shown_by"]()
    assert sorted(shown) == list(range(1, 116))


def test_the_table_says_with_what_a_line_is_shown(tables: dict[str, Any]) -> None:
    shown = tables["shown_by"]()
    for line, test in (
        (48, "`test_passes.py::test_line_48_one_request_without_memory_fails_alone`, *counting*"),
        (69, "`test_futures.py::test_line_69_nobody_reads_anothers_future`, *counting*"),
        (49, "`test_optimizer.py::test_line_49_three_steps_are_those_of_torch`"),
        (113, "`test_older_sdks.py::test_line_113_an_older_sdk_trains_saves_and_samples`, *soak*"),
    ):
        assert test in shown[line]


def test_the_table_names_every_line(tables: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "reference" / "tinker-conformance.md").read_text("utf-8")
    assert page == tables["renewed"](page), "run: python docs/tables.py"
    assert all(f"\n| {number} | " in page for number in range(1, 116))

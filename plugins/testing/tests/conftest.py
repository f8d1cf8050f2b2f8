"""How the kit's own tests say that a check catches a broken component."""

from collections.abc import Callable
from typing import Any

import pytest

from twinkle.testing import checks_for
from twinkle_testing.contracts import examine

Broken = dict[str, Any]


@pytest.fixture
def catches() -> Callable[..., None]:
    """Return a function that requires that a check of a kind fails for a component, and says why in words."""

    def check(kind: str, name: str, component: Any, **example: Any) -> None:
        report = examine(component, kind, only=lambda asked: asked == name, **example)
        result = report[name]
        assert result.outcome == "failed", f"{name} {result.outcome} for a broken component: {result.why}"
        assert len(result.why) > 10

    return check


@pytest.fixture
def passes() -> Callable[..., None]:
    """Return a function that requires that a component passes every check, or skips those named."""

    def check(kind: str, component: Any, skipped: set[str] | None = None, **example: Any) -> None:
        report = examine(component, kind, **example)
        assert report.ok, report.text()
        assert {result.name for result in report.skipped} == (skipped or set()), report.text()

    return check


@pytest.fixture
def own_checks() -> Callable[[str], set[str]]:
    """Return a function that gives the names of the checks of one kind alone."""
    return lambda kind: {check.name for check in checks_for(kind)} - {"docstring", "unknown_argument"}

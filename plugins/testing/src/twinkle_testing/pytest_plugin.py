"""The pytest plugin: nothing that the contract kit skips passes silently, and `--contracts NAME` makes tests of checks.

pytest loads it by itself where twinkle-core is installed. `pytest --contracts NAME` holds NAME (as `twinkle plugins
test` takes it) to the contracts of its kinds, one test a check, beside the tests that are collected anyway.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from twinkle_testing.contracts.report import ContractError, Report

_of_this_test: list[Report] = []
_all: list[Report] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--contracts`."""
    parser.getgroup("twinkle").addoption(
        "--contracts",
        action="append",
        default=[],
        metavar="NAME",
        help="a plugin, component, folder or ./file.py:Name to hold to the contracts of its kinds, one test a check",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hear of every report that `check_component` makes."""
    from twinkle_testing.contracts.running import listeners

    listeners.append(_of_this_test.append)
    config.add_cleanup(lambda: listeners.remove(_of_this_test.append))


@pytest.hookimpl(tryfirst=True)  # before -k and marks choose among the items
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add a test for each check of what `--contracts` names."""
    from twinkle_testing.contracts.running import checks_for
    from twinkle_testing.contracts.subjects import subjects_of

    for text in session.config.getoption("contracts"):
        for thing, kind in subjects_of(text):
            for check in checks_for(kind):
                name = f"{kind}:{getattr(thing, 'name', text)}::{check.name}"
                items.append(ContractTest.from_parent(session, name=name, thing=thing, of=kind, check=check.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that held a component to nothing, because every check was skipped."""
    _of_this_test.clear()
    yield
    _all.extend(_of_this_test)
    if _of_this_test and all(report.only_skipped for report in _of_this_test):
        pytest.skip(_why(_of_this_test))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which checks of which component were skipped, and why."""
    skipped = [report for report in _all if report.skipped and report.ok]
    if not skipped:
        return
    terminalreporter.section("contracts", sep="-")
    for report in skipped:
        terminalreporter.line(report.text())


class ContractTest(pytest.Item):
    """One check of one component.

    Args:
        thing: the component, as `check_component` takes it.
        of: its kind.
        check: name of the check.
        **kwargs: of every pytest item.
    """

    def __init__(self, *, thing: Any, of: str, check: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._thing, self._kind, self._check = thing, of, check

    def runtest(self) -> None:
        """Run the check."""
        from twinkle_testing.contracts.running import examine

        report = examine(self._thing, self._kind, only=lambda name: name == self._check)
        if not report.ok:
            raise ContractError(report)
        if report.only_skipped:
            pytest.skip(_why([report]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the report alone, without a traceback through the kit."""
        return str(excinfo.value) if isinstance(excinfo.value, ContractError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where it stands."""
        return self.path, None, self.name


def _why(reports: list[Report]) -> str:
    return "; ".join(dict.fromkeys(result.why for report in reports for result in report.skipped))

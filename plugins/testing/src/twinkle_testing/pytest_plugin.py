"""The pytest plugin: reports skipped contract checks, and turns checks into tests with `--contracts NAME`.

pytest loads it automatically if twinkle-testing is installed. `pytest --contracts NAME` runs the contract checks of
NAME (as for `twinkle plugins test`) as one test per check, in addition to the collected tests.
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
        help="a plugin, component, folder or ./file.py:Name whose contract checks to run, one test per check",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect every report of `check_component`."""
    from twinkle_testing.contracts.running import listeners

    listeners.append(_of_this_test.append)
    config.add_cleanup(lambda: listeners.remove(_of_this_test.append))


@pytest.hookimpl(tryfirst=True)  # before -k and marks select items
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add a test for each check of the components that `--contracts` names."""
    from twinkle_testing.contracts.running import checks_for
    from twinkle_testing.contracts.subjects import subjects_of

    for text in session.config.getoption("contracts"):
        for thing, kind in subjects_of(text):
            for check in checks_for(kind):
                name = f"{kind}:{getattr(thing, 'name', text)}::{check.name}"
                items.append(ContractTest.from_parent(session, name=name, thing=thing, of=kind, check=check.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test whose contract checks were all skipped."""
    _of_this_test.clear()
    yield
    _all.extend(_of_this_test)
    if _of_this_test and all(report.only_skipped for report in _of_this_test):
        pytest.skip(_why(_of_this_test))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report the skipped checks of each component with their reasons."""
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
        """Show only the report, without a traceback through the kit."""
        return str(excinfo.value) if isinstance(excinfo.value, ContractError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the location of the test."""
        return self.path, None, self.name


def _why(reports: list[Report]) -> str:
    return "; ".join(dict.fromkeys(result.why for report in reports for result in report.skipped))

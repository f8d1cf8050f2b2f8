"""The report of the contract kit about a component: a result for each check, as text or plain data."""

from dataclasses import dataclass
from typing import Any, Literal

from twinkle.errors import TwinkleError

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one component.

    Attributes:
        name: name of the check, such as `gradient`.
        statement: the requirement, in one line.
        outcome: `passed`, `failed` or `skipped`.
        why: reason of a failure or of a skip; empty if it passed.
        seconds: duration.
        error: exception of a failure.
    """

    name: str
    statement: str
    outcome: Outcome
    why: str = ""
    seconds: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks of one component, in the order in which they ran.

    Attributes:
        component: name of the component, or of its class.
        kind: its kind.
        results: one for each check.
    """

    component: str
    kind: str
    results: tuple[CheckResult, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def passed(self) -> list[CheckResult]:
        """The checks that passed."""
        return self._of("passed")

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that failed."""
        return self._of("failed")

    @property
    def skipped(self) -> list[CheckResult]:
        """The checks that were skipped, each with its reason."""
        return self._of("skipped")

    @property
    def only_skipped(self) -> bool:
        """Whether every check was skipped."""
        return not self.passed and not self.failed

    def __iter__(self) -> Any:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, name: str) -> CheckResult:
        """Return the result of one check by its name."""
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"{self.component} has no check {name!r}; there are: {', '.join(r.name for r in self.results)}")

    @property
    def summary(self) -> str:
        """One line with the numbers of checks that passed, failed and were skipped."""
        counts = [f"{len(self.passed)} passed"]
        counts += [f"{len(self.failed)} failed"] if self.failed else []
        counts += [f"{len(self.skipped)} skipped"] if self.skipped else []
        seconds = sum(result.seconds for result in self.results)
        return f"{self.kind} {self.component}: {', '.join(counts)} in {seconds:.2f} s"

    def text(self, *, everything: bool = False) -> str:
        """Return the summary with all failures and skips, and with `everything` also the checks that passed."""
        lines = [self.summary]
        if everything:
            lines += [f"  passed   {result.name}: {result.statement}" for result in self.passed]
        for of in (self.failed, self.skipped):
            by_reason: dict[str, list[CheckResult]] = {}
            for result in of:
                by_reason.setdefault(result.why, []).append(result)
            for why, results in by_reason.items():
                first, names = results[0], ", ".join(result.name for result in results)
                alone = len(results) == 1 and first.outcome == "failed"
                lines += [f"  {first.outcome:7}  {names}{': ' + first.statement if alone else ''}", *_indented(why)]
        return "\n".join(lines)

    def as_plain(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        results = [
            {
                "name": result.name,
                "statement": result.statement,
                "outcome": result.outcome,
                "why": result.why,
                "seconds": round(result.seconds, 4),
            }
            for result in self.results
        ]
        return {"component": self.component, "kind": self.kind, "ok": self.ok, "checks": results}

    def _of(self, outcome: Outcome) -> list[CheckResult]:
        return [result for result in self.results if result.outcome == outcome]


def _indented(text: str) -> list[str]:
    return [f"           {line}" for line in text.splitlines()]


class ContractError(TwinkleError, AssertionError):
    """A component breaks the contract of its kind.

    Attributes:
        report: the results of all checks.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(f"the component breaks the contract of its kind\n{report.text()}")
        self.report = report

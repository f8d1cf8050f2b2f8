"""Runs contract checks: `check_component` raises on failures, `examine` returns a report, `checks_for` lists checks."""

import contextlib
import functools
import importlib
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.errors import ArgumentError, ComponentTypeError, RequirementMissing, Unsupported
from twinkle_testing.contracts.case import Case, NotApplicable, Violation, check_example, example_keys
from twinkle_testing.contracts.report import CheckResult, ContractError, Report

listeners: list[Callable[[Report], None]] = []
"""Called with every report of `check_component`; the pytest plugin registers one."""


@dataclass(frozen=True, slots=True)
class Contract:
    """One check of a kind.

    Attributes:
        name: its name, for `-k` and `skip`.
        statement: the requirement, in one line.
        run: runs the check; raises if the component breaks the contract.
    """

    name: str
    statement: str
    run: Callable[[Any], None]


def checks_for(kind: str) -> tuple[Contract, ...]:
    """Return the checks of a kind, in the order in which they run.

    Args:
        kind: one of `twinkle.kinds.KINDS`.

    Raises:
        ArgumentError: the kind is unknown.
    """
    from twinkle_testing.contracts import common

    checks = (*common.CHECKS, *_module(kind).CHECKS)
    return tuple(Contract(run.__name__, (inspect.getdoc(run) or "").partition("\n")[0], run) for run in checks)


def about(kind: str) -> dict[str, str]:
    """Return the keys of an example of a kind, besides `kwargs` and `skip`, with their meaning.

    Args:
        kind: one of `twinkle.kinds.KINDS`.
    """
    case: type[Case] = _module(kind).CASE
    text = (inspect.getdoc(case) or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, says = line.strip().partition(": ")
        if line.startswith("    ") and not line.startswith("     ") and colon:
            found[key] = says
        elif found and line.strip():
            last = next(reversed(found))
            found[last] = f"{found[last]} {line.strip()}"
    return {key: says for key, says in found.items() if key in example_keys(case)}


def check_component(thing: Any, kind: str, **example: Any) -> Report:
    """Run the contract checks of a component.

    Args:
        thing: a class, an instance, a function, a `ComponentSpec` or any text that names a component.
        kind: its kind.
        **example: the example: `kwargs` (arguments of the constructor), `skip`, and the keys of the kind, see
            docs/reference/contract-kit.md. They override those of the manifest's `example`.

    Returns:
        The results. Checks that do not apply, and components that need an unavailable device or package, are skipped
        with the reason. Under pytest a test whose checks were all skipped is itself skipped.

    Raises:
        ContractError: a check failed; the message lists each failure with its reason.
        ArgumentError: an unknown kind, or a key that the kind's example does not have.
        ComponentNotFound: the name is unknown.
    """
    __tracebackhide__ = True
    report = examine(thing, kind, **example)
    for listener in listeners:
        listener(report)
    if not report.ok:
        raise ContractError(report)
    return report


def examine(thing: Any, kind: str, /, only: Callable[[str], bool] | None = None, **example: Any) -> Report:
    """Return the report of `check_component`, without raising for a failed check.

    Args:
        thing: see `check_component`.
        kind: see `check_component`.
        only: predicate of a check's name: whether to run the check; None runs all.
        **example: see `check_component`.
    """
    from twinkle_testing.contracts.subjects import Subject

    checks = [check for check in checks_for(kind) if only is None or only(check.name)]
    subject = Subject.of(thing, kind)
    try:
        component = subject.load()
    except RequirementMissing as error:
        return _all_skipped(subject.name, kind, checks, str(error))
    except ComponentTypeError as error:
        return Report(
            subject.name, kind, (CheckResult("contract", "It fits the contract of its kind.", "failed", str(error)),)
        )
    case_class: type[Case] = _module(kind).CASE
    given = {**subject.example(), **example}
    check_example(case_class, given, f"{kind} {subject.name}")
    _check_skips(given.get("skip"), kind, subject.name)
    with tempfile.TemporaryDirectory(prefix="contract-") as folder:
        case = case_class(component=component, declared=subject.inputs, folder=Path(folder), **given)
        return Report(subject.name, kind, tuple(_results(case, checks)))


def _results(case: Case, checks: list[Contract]) -> Iterator[CheckResult]:
    trouble, reason = None, case.unfit()
    if not reason:
        reason, trouble = _cannot_be_built(case)
    if trouble is not None:
        yield trouble
    declared = case.skip if isinstance(case.skip, Mapping) else {}
    for check in checks:
        why = reason or declared.get(check.name, "")
        yield CheckResult(check.name, check.statement, "skipped", why) if why else _result(case, check)


def _cannot_be_built(case: Case) -> tuple[str, CheckResult | None]:
    """Return the reason why no check can run, and the failure if it is one."""
    try:
        case.build()
    except (Unsupported, RequirementMissing) as error:
        return str(error), None
    except (Exception, SystemExit) as error:  # a constructor may raise anything
        why = f"{type(error).__name__}: {error}"
        arguments = case.kwargs or getattr(case, "make", None) or isinstance(error, ComponentTypeError)
        hint = "" if arguments else "; if it needs arguments, give them as kwargs= of its example"
        failed = CheckResult("build", "It can be built from its example.", "failed", why + hint, error=error)
        return "it could not be built", failed
    return "", None


def _result(case: Case, check: Contract) -> CheckResult:
    start = time.perf_counter()

    def ended(outcome: Any, why: str = "", error: BaseException | None = None) -> CheckResult:
        return CheckResult(check.name, check.statement, outcome, why, time.perf_counter() - start, error)

    try:
        with _generators_kept():
            check.run(case)
    except NotApplicable as reason:
        return ended("skipped", str(reason))
    except Violation as violation:
        return ended("failed", str(violation), violation)
    except (Exception, SystemExit) as error:  # the component may raise anything
        return ended("failed", f"it raised {type(error).__name__}: {error}", error)
    return ended("passed")


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the random generators of the process after the block."""
    import random
    import sys

    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    restore: list[Callable[[], Any]] = [functools.partial(random.setstate, random.getstate())]
    if torch is not None:
        restore.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
    if numpy is not None:
        restore.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _all_skipped(name: str, kind: str, checks: list[Contract], why: str) -> Report:
    return Report(name, kind, tuple(CheckResult(check.name, check.statement, "skipped", why) for check in checks))


def _check_skips(skip: Any, kind: str, name: str) -> None:
    from twinkle_registry import nearest

    known = [check.name for check in checks_for(kind)]
    for key in skip if isinstance(skip, Mapping) else ():
        if key not in known:
            near = nearest(key, known, 1)
            hint = f", nearest: {near[0]!r}" if near else ""
            raise ArgumentError(
                f"the example of {kind} {name} skips {key!r}, which is no check{hint}; there is: {', '.join(known)}"
            )


def _module(kind: str) -> Any:
    from twinkle.kinds import KINDS
    from twinkle_registry import nearest

    if kind not in KINDS:
        near = nearest(kind, KINDS, 1)
        hint = f", nearest: {near[0]!r}" if near else ""
        raise ArgumentError(f"there is no kind {kind!r}{hint}; there is: {', '.join(KINDS)}")
    return importlib.import_module(f"{__package__}.{kind}")

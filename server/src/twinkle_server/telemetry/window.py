"""Rates of the last minutes: what the dashboard and `twinkle top` show, second by second."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_KEPT: Final = 300
"""Seconds that are kept."""
_SHOWN: Final = 60
"""Seconds over which rates are averaged."""
_BAR: Final = 5
"""Seconds of each value of `history`."""
_TIMES: Final = 64
"""Maximum number of durations of one second that are kept for percentiles, by kind of operation."""


@dataclass(slots=True)
class _Second:
    at: int
    tokens: Counter[str] = field(default_factory=Counter)  # by tenant
    operations: Counter[str] = field(default_factory=Counter)  # by tenant
    failures: Counter[str] = field(default_factory=Counter)  # by tenant
    times: dict[str, list[float]] = field(default_factory=dict)  # by kind
    passes: int = 0
    busy: float = 0.0
    pass_tokens: int = 0
    padded: int = 0
    pass_tenants: int = 0
    pass_operations: int = 0


class Window:
    """Counts operations and passes of the last minutes.

    Args:
        clock: returns seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._begun = clock()
        self._seconds: deque[_Second] = deque(maxlen=_KEPT)
        self._ahead: Counter[str] = Counter()  # tokens of operations that still run and were counted, by tenant

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        """Count an operation that ended; see `ports.Figures`."""
        now = self._now()
        now.operations[tenant] += 1
        if outcome == "done":
            if tokens:
                counted = min(tokens, self._ahead[tenant])
                self._ahead[tenant] -= counted
                now.tokens[tenant] += tokens - counted
        elif outcome != "cancelled":
            now.failures[tenant] += 1
        times = now.times.setdefault(kind, [])
        if len(times) < _TIMES:
            times.append(seconds)

    def passed(self, head: Mapping[str, Any]) -> None:
        """Count the passes of a turn of the engine, without what `progressed` has counted; see `ports.Figures`."""
        now, reported = self._now(), head.get("reported", {})
        now.busy += max(0.0, float(head.get("seconds", 0.0)) - reported.get("seconds", 0.0))
        if head.get("kind") == "pass":
            passes = int(head.get("passes", 1))
            now.passes += passes - reported.get("passes", 0)
            now.pass_tokens += max(
                0, int(head.get("tokens", 0)) - reported.get("tokens", 0)
            )  # reported ones are an estimate
            now.padded += int(head.get("padded", 0))
            # Of a turn with several passes, it is not known which pass had which operations.
            now.pass_tenants += max(passes, int(head.get("tenants", 1))) - reported.get("passes", 0)
            now.pass_operations += max(passes, int(head.get("operations", 1))) - reported.get("passes", 0)

    def progressed(self, head: Mapping[str, Any]) -> None:
        """Count what the engine has computed of passes that go on; see `ports.Figures`."""
        now = self._now()
        now.busy += float(head["seconds"])
        now.passes += int(head["passes"])
        now.pass_tokens += int(head["tokens"])
        now.pass_tenants += int(head["passes"])
        now.pass_operations += int(head["passes"])
        self._ahead.update(head["tenants"])
        now.tokens.update(head["tenants"])

    def restarted(self) -> None:
        """Note that the engine was restarted: what it has computed of operations that ran is lost."""
        self._ahead.clear()

    def report(self, tenant: str | None = None) -> dict[str, Any]:
        """Return the rates of the last minute.

        Args:
            tenant: whose operations are counted; None counts all. Passes are always those of the whole service.
        """
        now = self._clock()
        seconds = [second for second in self._seconds if now - second.at <= _SHOWN]
        span = max(1.0, min(float(_SHOWN), now - self._begun))
        passes = sum(second.passes for second in seconds)
        computed = sum(second.pass_tokens + second.padded for second in seconds)
        useful = sum(second.pass_tokens for second in seconds)
        report: dict[str, Any] = {
            "tokens_per_second": round(sum(_of(second.tokens, tenant) for second in seconds) / span, 1),
            "operations_per_second": round(sum(_of(second.operations, tenant) for second in seconds) / span, 2),
            "failures": sum(_of(second.failures, tenant) for second in seconds),
            "passes_per_second": round(passes / span, 2),
            "pass_tokens": round(useful / passes, 1) if passes else 0.0,
            "pass_fill": round(useful / computed, 3) if computed else 0.0,
            "pass_tenants": round(sum(second.pass_tenants for second in seconds) / passes, 2) if passes else 0.0,
            "pass_operations": round(sum(second.pass_operations for second in seconds) / passes, 2) if passes else 0.0,
            "busy": round(min(1.0, sum(second.busy for second in seconds) / span), 3),
            "history": self._history(now, tenant),
        }
        if tenant is None:
            report["latency_ms"] = _latencies(seconds)
        return report

    def by_tenant(self) -> dict[str, float]:
        """Return tokens per second of the last minute by tenant."""
        now = self._clock()
        span = max(1.0, min(float(_SHOWN), now - self._begun))
        total: Counter[str] = Counter()
        for second in self._seconds:
            if now - second.at <= _SHOWN:
                total.update(second.tokens)
        return {tenant: round(tokens / span, 1) for tenant, tokens in total.items()}

    def _history(self, now: float, tenant: str | None) -> list[float]:
        """Return tokens per second in bars of `_BAR` seconds, oldest first."""
        bars = [0.0] * (_KEPT // _BAR)
        for second in self._seconds:
            place = len(bars) - 1 - int(now - second.at) // _BAR
            if 0 <= place < len(bars):
                bars[place] += _of(second.tokens, tenant) / _BAR
        return [round(value, 1) for value in bars]

    def _now(self) -> _Second:
        at = int(self._clock())
        if not self._seconds or self._seconds[-1].at != at:
            self._seconds.append(_Second(at))
        return self._seconds[-1]


def _of(counts: Counter[str], tenant: str | None) -> int:
    return counts.total() if tenant is None else counts[tenant]


def _latencies(seconds: list[_Second]) -> dict[str, list[float]]:
    """Return the median and the 99th percentile of durations in milliseconds, by kind of operation."""
    times: dict[str, list[float]] = {}
    for second in seconds:
        for kind, values in second.times.items():
            times.setdefault(kind, []).extend(values)
    latencies = {}
    for kind, values in sorted(times.items()):
        values.sort()
        latencies[kind] = [round(1000 * values[int(share * (len(values) - 1))], 1) for share in (0.5, 0.99)]
    return latencies

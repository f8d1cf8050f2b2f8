"""Rates of the last minute, of one tenant or of all."""

from twinkle_server.telemetry.window import Window


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_over_the_last_minute() -> None:
    clock = Clock()
    window = Window(clock)
    for _ in range(120):
        clock.now += 1
        window.finished("forward_backward", "done", 0.25, 100, "ana")
        window.finished("optim_step", "done", 0.01, 0, "eve")
        window.passed({"kind": "pass", "seconds": 0.5, "tokens": 90, "padded": 10, "tenants": 2, "operations": 3})
    everything, ana = window.report(), window.report("ana")
    assert 98 <= everything["tokens_per_second"] <= 103
    assert 1.9 <= everything["operations_per_second"] <= 2.1
    assert everything["tokens_per_second"] == ana["tokens_per_second"]
    assert 0.95 <= ana["operations_per_second"] <= 1.05
    assert (everything["pass_tokens"], everything["pass_fill"]) == (90.0, 0.9)
    assert (everything["pass_tenants"], everything["pass_operations"]) == (2.0, 3.0)
    assert 0.49 <= everything["busy"] <= 0.52
    assert everything["latency_ms"] == {"forward_backward": [250.0, 250.0], "optim_step": [10.0, 10.0]}
    assert "latency_ms" not in ana, "durations tell something about others"
    assert sum(everything["history"]) * 5 == 120 * 100
    clock.now += 61
    assert window.report()["tokens_per_second"] == 0.0
    assert window.by_tenant() == {}


def test_failures_are_counted_and_cancelled_operations_are_not() -> None:
    clock = Clock()
    window = Window(clock)
    for outcome in ("done", "user", "server", "cancelled"):
        window.finished("forward", outcome, 0.1, 10, "ana")
    assert window.report("ana")["failures"] == 2
    assert window.report("eve")["failures"] == 0
    assert window.report()["tokens_per_second"] == 10.0


def test_old_seconds_are_dropped() -> None:
    clock = Clock()
    window = Window(clock)
    for _ in range(1000):
        clock.now += 1
        window.finished("forward", "done", 0.1, 1, "ana")
    assert len(window._seconds) == 300


def test_an_operation_of_many_passes_counts_while_it_runs_and_once() -> None:
    clock = Clock()
    window = Window(clock)
    for _ in range(20):
        clock.now += 1
        window.progressed({"seconds": 1.0, "passes": 4, "tokens": 4000, "tenants": {"ana": 4000}})
    running = window.report()
    assert running["tokens_per_second"] == window.report("ana")["tokens_per_second"] == 4000.0
    assert (running["busy"], running["passes_per_second"], running["pass_tokens"]) == (1.0, 4.0, 1000.0)
    clock.now += 1
    reported = {"seconds": 20.0, "passes": 80, "tokens": 80_000}
    head = {
        "seconds": 21.0,
        "tokens": 84_000,
        "padded": 0,
        "tenants": 1,
        "operations": 1,
        "passes": 84,
        "reported": reported,
    }
    window.passed({"kind": "pass", **head})
    window.finished("forward_backward", "done", 21.0, 84_000, "ana")
    over = window.report()
    assert sum(over["history"]) * 5 == 84_000
    assert (over["busy"], over["pass_tokens"], over["pass_operations"], over["pass_tenants"]) == (1.0, 1000.0, 1.0, 1.0)
    window.finished("forward_backward", "done", 1.0, 500, "ana")
    assert sum(window.report()["history"]) * 5 == 84_500


def test_what_an_engine_computed_before_it_died_is_not_taken_from_later_operations() -> None:
    window = Window(Clock())
    window.progressed({"seconds": 1.0, "passes": 1, "tokens": 900, "tenants": {"ana": 900}})
    window.restarted()
    window.finished("forward_backward", "done", 1.0, 500, "ana")
    assert window.report()["tokens_per_second"] == 1400.0

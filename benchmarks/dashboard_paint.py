"""Time from the request of a dashboard page to its first paint, in a headless Chromium on this machine.

    python benchmarks/dashboard_paint.py      # needs Chromium, see `make browser`

The service has 32 runs, one of them with 1,000 optimizer steps and 32 rollouts; its engine computes nothing. Each page
is opened in a browser context without a cache. Goals: the first contentful paint of the overview and of the run, from
the second visit on, within 400 ms; the curves of the run drawn within 800 ms.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from _pairs import describe_machine
from _server import PACKAGES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Browser, browser, chromium
from dashboard_runs import byte_tokenizer, model_folder, sampled_row
from server_raw import Raw
from serving import ledger

RUNS, STEPS, VISITS = 32, 1000, 7
GOALS = {"overview": 400.0, "run": 400.0, "run, curves drawn": 800.0}
PAINT = "performance.getEntriesByType('paint').find(entry => entry.name === 'first-contentful-paint')?.startTime"


def main() -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    try:
        chromium()
    except AssertionError as error:
        print(f"not measured: {error}")
        return 0
    with tempfile.TemporaryDirectory() as folder, browser() as running:
        served = ledger(Path(folder) / "data", {"model": str(model_folder(Path(folder) / "model"))}).start()
        try:
            with Raw(served.url) as raw:
                run = fill(raw)
            times = {"overview": [], "run": [], "run, curves drawn": []}
            for _ in range(VISITS):
                times["overview"].append(visit(running, f"{served.url}/")[0])
                painted, drawn = visit(running, f"{served.url}/ui/runs/{run}", f"dataset.steps === '{STEPS}'")
                times["run"].append(painted)
                times["run, curves drawn"].append(drawn)
        finally:
            served.stop()
    print(describe_machine([*PACKAGES, "jinja2"]))
    print(f"{RUNS} runs, {STEPS} steps; milliseconds after the request, {VISITS} visits")
    print(f"{'':20}{'first visit':>12}{'median':>9}{'min':>7}{'max':>7}{'goal':>7}")
    missed = 0
    for name, (first, *later) in times.items():
        middle = statistics.median(later)
        missed += middle > GOALS[name]
        print(f"{name:20}{first:>12.0f}{middle:>9.0f}{min(later):>7.0f}{max(later):>7.0f}{GOALS[name]:>7.0f}")
    return 1 if missed else 0


def fill(raw: Raw) -> str:
    """Make runs, let one train, and return its id."""
    tokens = byte_tokenizer().encode("What is 2 + 3? It is 5.").ids
    models = [raw.model() for _ in range(RUNS)]
    futures = []
    for step in range(STEPS):
        rows = [sampled_row(tokens[:15], tokens[15:], float(step % 2), 0.01)]
        models[0].submit_pass(rows, "importance_sampling")
        futures.append(models[0].submit("optim_step", adam_params={"learning_rate": 1e-3}))
    for future in futures:
        raw.result(future)
    return models[0].id


def visit(running: Browser, url: str, condition: str | None = None) -> tuple[float, float]:
    """Open a page; return milliseconds until its first paint, and until a condition of its curves holds."""
    with running.page() as page:
        page.goto(url)
        painted = page.wait(PAINT)
        drawn = painted
        if condition is not None:
            drawn = page.eval(
                "new Promise(resolve => { const look = () => "
                f"document.getElementById('curves').{condition} ? resolve(performance.now()) : setTimeout(look, 5);"
                " look(); })"
            )
        assert not page.problems, page.problems
        return float(painted), float(drawn)


if __name__ == "__main__":
    sys.exit(main())

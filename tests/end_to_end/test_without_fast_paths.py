"""The demos of the Makefile with every fast path off: they end well, within the memory that they state."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_transformers.memory import own_limit

ROOT = Path(__file__).parents[2]
DEMOS = {
    "quickstart": ["-m", "twinkle.cli", "run", "sft", "--config", str(ROOT / "examples/quickstart.yaml")],
    "serve-demo": [str(ROOT / "examples/serve_demo.py")],
    "grpo-demo": [
        "-m", "twinkle.cli", "run", "grpo", "--config", str(ROOT / "examples/grpo_demo.yaml"), "--max_steps", "2",
        "--eval_every", "2", "--save_every", "2",
    ],
}  # fmt: skip
SLACK = 0.25
"""Of the limit: buffers below 1 MiB, of which glibc keeps freed ones, and what threads have."""


def stated() -> str:
    """Return the limit that the Makefile gives the demos."""
    found = re.search(r"^TWINKLE_MEMORY_LIMIT \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_every_demo_of_the_makefile_has_the_limit_that_the_documentation_states() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    for target in DEMOS:
        [at] = [number for number, line in enumerate(lines) if line.startswith(f"{target}:")]
        assert lines[at + 1].startswith("\t$(DEMO)/")
    [demo] = [line for line in lines if line.startswith("DEMO :=")]
    assert "TWINKLE_MEMORY_LIMIT=$(TWINKLE_MEMORY_LIMIT)" in demo
    number = stated().removesuffix("GB")
    page = (ROOT / "docs/guides/researcher/recipes.md").read_text("utf-8")
    assert f"The demo targets of the Makefile set this variable to {number} GB" in page


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_ends_well_within_its_memory(demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_MEMORY_LIMIT", stated())
    limit = own_limit()
    assert limit
    environment = {**os.environ, "TWINKLE_DISABLE_FAST_PATHS": "all", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("OMP_NUM_THREADS", None)  # as the Makefile's target runs
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *DEMOS[demo]], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    assert process.returncode == 0, text[-4000:]
    assert "no answer" not in text
    assert usage.ru_maxrss * 1024 <= (1 + SLACK) * limit, text[-4000:]  # of the largest process of its tree

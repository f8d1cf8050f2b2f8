"""Every fast path is on for the bundled models: with the kernels of this machine, and with those of another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle.testing import tiny_model
from twinkle_testing.other_machine import VARIABLE
from twinkle_torch.numerics import FAST_PATHS
from twinkle_transformers.doctor.command import evidence_of

ROOT = Path(__file__).parents[2]
REAL = "builtin://smollm2-135m-instruct"
PRINTS_EVIDENCE = """
import sys
from twinkle_testing.other_machine import round_by_rows
from twinkle_transformers.doctor.command import evidence_of
round_by_rows(2.0)
for found in evidence_of(sys.argv[1], "float32"):
    print(found.path, found.exact, found.method)
"""


def assert_all_on(model: str, dtype: str) -> None:
    found = {evidence.path: evidence for evidence in evidence_of(model, dtype)}
    assert set(FAST_PATHS) <= found.keys()
    assert not [str(evidence) for evidence in found.values() if not evidence.exact]
    assert {found[path].dtype for path in FAST_PATHS} == {dtype}


@pytest.mark.model
@pytest.mark.full
def test_all_are_on_for_the_bundled_model_in_float32() -> None:
    assert_all_on(REAL, "float32")


@pytest.mark.model
@pytest.mark.full  # float64 decides, which takes more than 20 s on one core
def test_all_are_on_for_the_bundled_model_in_bfloat16() -> None:
    assert_all_on(REAL, "bfloat16")


@pytest.mark.full
def test_all_are_on_for_a_tiny_model_where_products_round_by_their_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PRINTS_EVIDENCE, str(tiny_model(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split()[0] in FAST_PATHS)
    assert found.keys() == set(FAST_PATHS)
    assert all(result.startswith("True ") for result in found.values()), found
    assert not all(result.endswith("equal bits") for result in found.values()), "the mode had no effect"


@pytest.mark.full
def test_numeric_tests_pass_where_products_round_by_their_rows() -> None:
    """A choice of the suites of `make test-all`, which runs all of them so."""
    tests = "plugins/transformers/tests"
    chosen = [
        f"{tests}/test_sampler_groups.py",
        f"{tests}/test_pool_calls.py::test_losses_of_three_kinds_in_one_call_are_their_formulas_on_peft_s_logps",
        f"{tests}/test_pool_experts.py::test_in_float32_the_numbers_are_those_of_peft_but_for_rounding",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = {**os.environ, VARIABLE: "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]

"""`make test-all` runs two of the variants that a processor has, `make soak` all; they fail if one of them does."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/instruction_sets.py"))
AMD = "model name\t: AMD EPYC 7763\nflags\t\t: fpu sse2 avx2 fma\n"
INTEL = "model name\t: Intel Xeon 8481C\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (AMD, ["AVX2", "MKL_CBWR=COMPATIBLE"]),
        (INTEL, ["AMX", "AVX512_BF16", "AVX512", "AVX2", "MKL_CBWR=COMPATIBLE"]),
        (ARM, []),
        ("", []),
    ],
)
def test_a_processor_runs_the_variants_of_its_instruction_sets(cpuinfo: str, expected: list[str]) -> None:
    labels = [label for label, _ in SCRIPT["variants"](cpuinfo)]
    assert labels == ["native, 1 thread", "native, 2 threads", *expected, "rounding by rows"]


@pytest.mark.parametrize(
    ("cpuinfo", "expected"), [(AMD, ["AVX2"]), (INTEL, ["AMX", "AVX2"]), (ARM, ["native, 1 thread"])]
)
def test_few_variants_are_those_of_the_most_and_the_fewest_sets(cpuinfo: str, expected: list[str]) -> None:
    assert [label for label, _ in SCRIPT["extremes"](cpuinfo)] == expected


def test_each_set_limits_all_three_libraries() -> None:
    switches = dict(SCRIPT["variants"](INTEL))
    for label in ("AMX", "AVX512_BF16", "AVX512", "AVX2"):
        assert {"ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"} < switches[label].keys()
    assert switches["native, 2 threads"] == {"OMP_NUM_THREADS": "2"}
    assert switches["rounding by rows"]["TWINKLE_TEST_ROUND_BY_ROWS"] == "2"


def test_every_suite_exists() -> None:
    assert all((SCRIPT["ROOT"] / suite).is_file() for suite in (*SCRIPT["SUITES"], *SCRIPT["POOLS"]))


@pytest.mark.full
def test_a_variant_whose_tests_fail_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "test_switch.py"
    suite.write_text("import os\ndef test_it():\n    assert os.environ['OMP_NUM_THREADS'] == '2'\n")
    results = [SCRIPT["run"](variant, [str(suite)]) for variant in SCRIPT["variants"]("")[:2]]
    assert results == [False, True]
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("native, 1 thread")
    assert "FAILED" in first
    assert "1 passed" in last

"""`twinkle doctor` reports what was measured on this machine, in about ten lines, and nothing else."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from twinkle_transformers.doctor.command import lines_of, main, prefix_attention
from twinkle_transformers.doctor.machine import ROW_COUNTS, machine_facts, measure_products

PATHS = {"packing", "prefixes", "fused", "steps"}


def report(*arguments: str) -> dict:
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_all_fast_paths_of_a_tiny_model_are_on_with_their_numbers() -> None:
    found = report("--dtype", "float32")
    paths = found["paths"]["float32"]
    assert {path["path"] for path in paths if path["exact"]} == PATHS
    assert all(max(path["difference"], path["moved"]) <= 16 * path["rounding"] for path in paths)
    lines = list(lines_of(found))
    assert len(lines) <= 10
    assert all("off" not in line or "off by" in line for line in lines)


def test_paths_that_are_disabled_are_off_with_the_true_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "all")
    found = report("--dtype", "float32")
    reasons = {path["path"]: path["reason"] for path in found["paths"]["float32"]}
    assert set(reasons) == PATHS
    assert all("disabled by TWINKLE_DISABLE_FAST_PATHS" in reason for reason in reasons.values())
    assert sum("off: " in line for line in lines_of(found)) == len(PATHS)


def test_rows_that_are_named_have_other_bits_and_others_have_equal_ones() -> None:
    other = measure_products(torch.float32, torch.device("cpu"))["other_bits"]
    rows = torch.randn(64, 576, generator=torch.Generator().manual_seed(5))
    weight = torch.randn(1536, 576, generator=torch.Generator().manual_seed(6))
    whole = rows @ weight.T
    # The kernel depends on shapes, not on values: other values must give the same answer.
    again = [n for n in ROW_COUNTS if not torch.equal(torch.nn.functional.linear(rows[:n], weight), whole[:n])]
    assert again == other


def test_the_processor_is_read_from_the_kernel(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Acme Nine\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile\n")
    facts = machine_facts(torch.device("cpu"), cpuinfo)
    assert facts["processor"] == "Acme Nine"
    assert facts["instruction_sets"] == ["avx2", "avx512f", "amx_bf16"]
    assert facts["total_bytes"] > facts["free_bytes"] > 0


def test_the_kernel_of_shared_prefixes_is_named_only_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle_torch import prefix_attention as kernels

    assert "by torch's flash kernel" in prefix_attention(torch.device("cpu"))
    assert prefix_attention(torch.device("cuda")).startswith("reads copies of its keys")
    monkeypatch.setattr(kernels, "has_kernel", lambda: False)
    assert "this torch lacks the flash kernel" in prefix_attention(torch.device("cpu"))


def test_of_row_counts_it_says_what_was_tried() -> None:
    found = report("--dtype", "float32")
    for facts in found["machine"]["products"].values():
        facts["other_bits"] = []
    rates = [line for line in lines_of(found) if "GFLOP/s" in line]
    wanted = f"a row has the same bits in a product of 64 rows and of {len(ROW_COUNTS)} other sizes"
    assert [line.endswith(wanted) for line in rates] == [True, True]

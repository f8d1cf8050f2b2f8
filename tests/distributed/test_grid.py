"""The update does not depend on how the rows are cut: every cell of a grid against plain torch in float64.

{1, 2 ranks} x {DDP, FSDP2} x {padded, padding-free, packed} x {1, 2 accumulation steps} x {whole, micro-batched},
each with LoRA and with all parameters, with a mean over tokens and a mean over rows. SGD with lr 1, uneven lengths.
"""

import itertools
import json
from pathlib import Path

import pytest
from ranks import torchrun

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("grid_worker.py")
LIMIT = 2e-6
KINDS = [" ".join(kind) for kind in itertools.product(("LoRA", "full"), ("token-mean", "sequence-mean"))]
CELLS = [
    " ".join(cell)
    for cell in itertools.product(
        "12", ("DDP", "FSDP2"), ("padded", "padding-free", "packed"), ("x1", "x2"), ("whole", "micro")
    )
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far the update of each cell is from the reference, relative to the reference's norm."""
    folder = tmp_path_factory.mktemp("grid")
    tiny_model(folder / "model")
    found: dict[str, float] = {}
    for ranks in (1, 2):
        result = folder / f"{ranks}.json"
        done = torchrun(WORKER, folder / "model", result, ranks=ranks)
        assert done.returncode == 0, done.stderr[-4000:]
        found |= json.loads(result.read_text())
    return found


def table(errors: dict[str, float]) -> str:
    """Return the grid as text: a line a cell, a column a kind of training."""
    lines = ["ranks placing layout steps split".ljust(40) + "".join(kind.rjust(22) for kind in KINDS)]
    for cell in CELLS:
        lines.append(cell.ljust(40) + "".join(f"{errors[f'{cell} {kind}']:22.1e}" for kind in KINDS))
    return "\n".join(lines)


@pytest.mark.parametrize("cell", CELLS)
def test_the_update_is_that_of_plain_torch_in_float64(cell: str, errors: dict[str, float]) -> None:
    assert {kind: errors[f"{cell} {kind}"] for kind in KINDS if not errors[f"{cell} {kind}"] <= LIMIT} == {}


def test_no_cell_is_left_out(errors: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(errors) == sorted(f"{cell} {kind}" for cell in CELLS for kind in KINDS)
    with capsys.disabled():
        print("\n" + table(errors))

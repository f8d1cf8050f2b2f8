"""What `import twinkle` and the command may load: nothing heavy, from anywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "pydantic",
    "ray",
    "fastapi",
    "datasets",
    "pandas",
    "pyarrow",
    "rich",
    "peft",
)
ROOT = Path(__file__).parents[2]


def heavy_after(code: str, folder: Path) -> list[str]:
    """Return which heavy packages a fresh process has loaded after `code`, run in `folder`."""
    probe = f"import json, sys\n{code}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    # `-c` puts the current folder on sys.path, as an interactive session does.
    result = subprocess.run([sys.executable, "-c", probe], cwd=folder, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(result.stdout.splitlines()[-1])
    return found


ROOMS = "import importlib, twinkle.kinds\nfor kind in twinkle.kinds.KINDS: importlib.import_module('twinkle.' + kind)"
HELP = "from click.testing import CliRunner; from twinkle.cli import main; CliRunner().invoke(main, ['--help'])"
LISTING = (
    "from click.testing import CliRunner; from twinkle.cli import main; CliRunner().invoke(main, ['plugins', 'list']); "
    "assert 'GRPOLoss' in CliRunner().invoke(main, ['plugins', 'list', 'loss']).output"
)
DOCTOR = (
    "from click.testing import CliRunner; from twinkle.cli import main; CliRunner().invoke(main, ['plugins', 'doctor'])"
)


@pytest.mark.parametrize("folder", [ROOT, Path("/")], ids=["repository root", "elsewhere"])
@pytest.mark.parametrize(
    "code",
    [
        "import twinkle",
        "import twinkle.cli",
        "import twinkle.runtime",
        "import twinkle.errors",
        ROOMS,
        HELP,
        LISTING,
        DOCTOR,
    ],
    ids=["twinkle", "cli", "runtime", "errors", "rooms", "help", "list", "doctor"],
)
def test_nothing_heavy_is_loaded(code: str, folder: Path) -> None:
    assert heavy_after(code, folder) == []


def test_names_of_components_are_listed_without_importing_them() -> None:
    assert heavy_after("import twinkle.loss, twinkle.model; dir(twinkle.loss), dir(twinkle.model)", ROOT) == []


def test_from_the_repository_root_the_plugins_are_found_as_anywhere() -> None:
    code = "from twinkle._registry import registry; print(sorted(r.name + r.status for r in registry().records))"
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
        for folder in (ROOT, Path("/"))
    ]
    assert runs[0] == runs[1]
    assert "twinkle-core" in runs[0]


def test_importing_twinkle_changes_nothing_of_the_process() -> None:
    code = (
        "import os, logging, multiprocessing; before = dict(os.environ)\n"
        "import twinkle, twinkle.runtime, twinkle.cli\n"
        "assert dict(os.environ) == before and not logging.getLogger().handlers\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None"
    )
    assert heavy_after(code, ROOT) == []

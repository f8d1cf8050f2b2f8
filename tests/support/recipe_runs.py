"""Runs of recipes on tiny models: in this process, or killed at a chosen call and continued."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle import registry
from twinkle.run import Run
from twinkle_cli.run import config_model

TIMES = ("tokens_per_second", "seconds/")
_DRIVER = """
import json, os, sys
from importlib import import_module

import peft, twinkle.dataloader, twinkle.dataset, twinkle.loss, twinkle.model, twinkle.sampler  # once for all forks
from recipe_runs import deadly, run_recipe


def in_a_fork(root, place, **changes):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        if place:
            deadly(*place)
        run_recipe(recipe, values, root=root, **changes)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


recipe, values, places = json.loads(sys.argv[1])
for name, place in places.items():
    assert in_a_fork(name, place) == (-9 if place else 0), name
    if place:
        [folder] = os.listdir(name)
        with open(os.path.join(name, folder, "metrics.jsonl")) as file, open(name + ".left", "w") as left:
            left.write(file.read())
        assert in_a_fork(name, None, resume_from=os.path.join(name, folder)) == 0, name
"""


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `changes` in them, inner mappings merged likewise."""
    result = dict(values)
    for key, change in changes.items():
        inner = isinstance(change, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], change) if inner else change
    return result


def run_recipe(
    recipe: str, values: Mapping[str, Any], *, root: str = "runs", **changes: Any
) -> tuple[Path, dict[str, Any]]:
    """Run a recipe here, in a folder below `root`; return the folder and its summary."""
    model: Any = config_model(recipe)
    config = model.model_validate(merged(values, changes))
    with Run("tiny", config=config.model_dump(), trackers=config.trackers, root=root, folder=config.run_folder) as run:
        return run.folder, registry().build(recipe, "recipe")(config, run)


def killed_and_continued(
    recipe: str, values: Mapping[str, Any], places: Mapping[str, tuple[str, int] | None]
) -> dict[str, Path]:
    """Run a recipe once for each place, in processes of their own, and go on where one was killed.

    Args:
        recipe: its name.
        values: of its configuration.
        places: `(module:Owner.method, n)`: the run kills itself at that call; None: it is left alone.

    Returns:
        The folder of each run. Beside a killed one, `<name>.left` holds the lines that stood when it died.
    """
    driver = [sys.executable, "-c", _DRIVER, json.dumps([recipe, values, places])]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(driver, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: next(Path(name).iterdir()) for name in places}


def deadly(place: str, at: int) -> None:
    """Let this process kill itself at the call number `at` of `module:Owner.method`."""
    import importlib
    import signal

    module, _, names = place.partition(":")
    owner = getattr(importlib.import_module(module), names.partition(".")[0])
    method = names.partition(".")[2]
    call, calls = getattr(owner, method), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, method, dying)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of a file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return the lines without what a clock says."""
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines(folder)]


def check_same(one: Path, other: Path) -> None:
    """Assert that two runs wrote the same lines, but for times, and ended with the same weights."""
    assert timeless(one) == timeless(other)
    [weights] = (*one.glob("adapter/*.safetensors"), *one.glob("model/*.safetensors"))
    assert weights.read_bytes() == (other / weights.relative_to(one)).read_bytes()

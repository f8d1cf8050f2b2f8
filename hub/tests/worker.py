"""The process in which tests use the hubs: reads expressions as lines of JSON, and writes their values."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from twinkle.hub import HubOperation, local_model, open_hub


def dataset(*args: Any, **kwargs: Any) -> list[Any]:
    from twinkle.dataset import Dataset, DatasetMeta

    return list(Dataset(DatasetMeta(*args), **kwargs))


def stream(*args: Any, **kwargs: Any) -> list[Any]:
    from twinkle.dataset import DatasetMeta, IterableDataset

    return list(IterableDataset(DatasetMeta(*args), **kwargs))


def files(folder: Any) -> dict[str, str]:
    """Return path and content of all files, as far as they are text."""
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8", "replace") for path in found}


def size(path: str) -> int:
    return Path(path).stat().st_size


def code(scheme: str, repo: str, commit: str, target: str) -> dict[str, str]:
    open_hub(f"{scheme}://").download_code(repo, commit, Path(target))
    return files(target)


KNOWN = {value.__name__: value for value in (HubOperation, local_model, open_hub, dataset, stream, files, size, code)}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    before = dict(os.environ)
    os.environ.update(asked["environment"])
    try:
        return {"value": eval(asked["expression"], {**KNOWN, **asked["names"], "sys": sys})}
    except Exception as error:
        return {"error": str(error), "kinds": [cls.__name__ for cls in type(error).__mro__]}
    finally:
        os.environ.clear()
        os.environ.update(before)


screen, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not become an answer
for line in sys.stdin:
    screen.write(json.dumps(answer(json.loads(line)), default=str) + "\n")
    screen.flush()

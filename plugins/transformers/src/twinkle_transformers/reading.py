"""Reads the files of a checkpoint; whatever is wrong with one is a `CheckpointError` that names it."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from twinkle.errors import CheckpointError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the file is truncated or corrupt") from error
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); the checkpoint is incomplete") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object; the checkpoint is damaged")
    return found

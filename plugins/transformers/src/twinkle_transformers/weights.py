"""Weight files looked at before they are loaded: every shard there, whole, and what it says it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_weights(folder: Path) -> None:
    """Raise unless the weights of a Hugging Face folder are complete: all shards, whole headers, whole bytes.

    Raises:
        ModelLoadError: there are none, or one is missing, truncated or corrupt; the message names the file.
    """
    if (folder / _INDEX).is_file():
        for shard in sorted(_shards(folder / _INDEX)):
            if not (folder / shard).is_file():
                raise ModelLoadError(f"{folder} lacks {shard}, which {_INDEX} lists; fetch the model again")
            read_header(folder / shard)
    elif (folder / _SINGLE).is_file():
        read_header(folder / _SINGLE)
    elif not any((folder / name).is_file() for name in _PICKLES):
        raise ModelLoadError(f"{folder} has a config.json but no weights: neither {_SINGLE} nor {_INDEX} is there")


def read_header(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the header of a safetensors file: for each tensor its `dtype`, `shape` and `data_offsets`.

    Raises:
        ModelLoadError: the file is no safetensors file, or its length is not what its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelLoadError(f"{path} is truncated or no safetensors file ({size} bytes); fetch it again")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ModelLoadError(f"{path} is corrupt: its safetensors header cannot be read; fetch it again") from error
    if 8 + length + end != size:
        raise ModelLoadError(
            f"{path} is truncated or damaged: {size} bytes, its header says {8 + length + end}; fetch it again"
        )
    return dict(header)


def _shards(index: Path) -> set[str]:
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return set(weights.values())
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is corrupt: {error}; fetch it again") from error

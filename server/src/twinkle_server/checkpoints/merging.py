"""Merges an adapter into the weights of its base model, shard by shard, in the dtype of the base.

A shard is copied, and the adapted tensors of the copy are replaced in pieces: memory does not grow with the model, and
all other tensors keep their bytes. Products are computed in float64 and rounded once. Runs as a process of its own:
`python -m twinkle_server.checkpoints.merging BASE ADAPTER OUTPUT JSON`.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from twinkle_server.engine.files import Published, publish
from twinkle_server.tokenizer import tokenizer_files

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
ADAPTER: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
HEAD: Final = "model-lm_head.safetensors"
"""An output head that the base model shares with its embedding, and that the adapter has changed."""
FIRST: Final = "model-00001.safetensors"
"""The file of a base with a single one, beside such a head: loaders that find `SINGLE` do not read the index."""
_OTHERS: Final = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
_KEY: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_HEADER: Final = 2**27
_PIECE: Final = 8 * 2**20  # elements that are computed at once
_REFUSED: Final = ("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication")
_SWITCHES: Final = ("use_dora", "lora_bias", "use_qalora", "use_bdlora")


class CannotMerge(ValueError):
    """The adapter cannot be merged into this base model; the message is for the client and names no folder."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a safetensors file.

    Attributes:
        file: name of the file.
        dtype: as in the file, such as "BF16".
        shape: of the tensor.
        start: of its data in the file, in bytes.
        end: likewise.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The change of a weight: `scale * b @ a`.

    Attributes:
        a: `[rank, in]`, float64.
        b: `[out, rank]`, float64.
        scale: of the product.
    """

    a: Array
    b: Array
    scale: float


def read_header(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CannotMerge: it is not one.
    """
    try:
        with (folder / name).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            fields: dict[str, Any] = orjson.loads(file.read(size) if size <= _HEADER else b"")
        fields.pop("__metadata__", None)
        return {
            key: Tensor(
                name, str(entry["dtype"]), tuple(entry["shape"]), *(8 + size + at for at in entry["data_offsets"])
            )
            for key, entry in fields.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotMerge(f"{name} is not a readable safetensors file") from error


def read_base(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a model by name, and its files.

    Raises:
        CannotMerge: the model has no safetensors weights, or they are quantized.
    """
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("quantization_config"):
        raise CannotMerge("the base model is quantized; merge into its unquantized weights elsewhere")
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    else:
        names = [SINGLE]
    if any(Path(name).name != name for name in names) or not all((folder / name).is_file() for name in names):
        raise CannotMerge("the base model has no safetensors weights")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read_header(folder, name)
    return tensors, names


def read_deltas(folder: Path) -> tuple[dict[str, Delta], Mapping[str, Any]]:
    """Return the changes of an adapter by module, and its configuration.

    Raises:
        CannotMerge: it has parts other than LoRA matrices.
    """
    if not (folder / ADAPTER).is_file() or not (folder / CONFIG).is_file():
        raise CannotMerge(
            "the checkpoint has no plain adapter files; save one with save_weights_for_sampler or save_weights_external"
        )
    config = json.loads((folder / CONFIG).read_bytes())
    used = [name for name in (*_REFUSED, *_SWITCHES) if config.get(name)]
    if used or config.get("bias", "none") != "none":
        raise CannotMerge(f"the adapter uses {', '.join(used) or 'bias'}, which cannot be merged")
    matrices: dict[str, dict[str, Array]] = {}
    for key, tensor in read_header(folder, ADAPTER).items():
        match = _KEY.fullmatch(key)
        if match is None or len(tensor.shape) != 2:
            raise CannotMerge(f"the adapter contains {key[:200]!r}, which is not a LoRA matrix of a linear layer")
        with (folder / ADAPTER).open("rb") as file:
            matrices.setdefault(match[1], {})[match[2]] = _read(file, tensor, 0, tensor.shape[0])
    deltas = {}
    for module, pair in matrices.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise CannotMerge(f"the adapter's matrices of {module[:200]!r} do not fit together")
        deltas[module] = Delta(pair["A"], pair["B"], _scale(config, module, pair["A"].shape[0]))
    return deltas, config


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = float(config["lora_alpha"] if alpha is None else alpha)
    return float(alpha / np.sqrt(rank)) if config.get("use_rslora") else alpha / rank


def merge(base: Path, adapter: Path, output: Path, progress: Progress = lambda done, total: None) -> None:
    """Write the merged model into an existing empty folder: weights, configuration and tokenizer.

    Args:
        base: folder of the base model.
        adapter: folder with PEFT's files.
        output: the folder.
        progress: called with the number of written bytes and of all bytes.

    Raises:
        CannotMerge: the adapter does not fit, or a merged weight is not finite.
        OSError: the disk is full or failed.
    """
    tensors, names = read_base(base)
    deltas, config = read_deltas(adapter)
    transposed = bool(config.get("fan_in_fan_out"))
    targets, head = _targets(deltas, tensors, json.loads((base / "config.json").read_bytes()))
    total, done = size_of_merged(base), 0
    files = {name: FIRST if head is not None and name == SINGLE else name for name in names}
    for name, written in files.items():
        shutil.copyfile(base / name, output / written)
        with (output / written).open("r+b") as file:
            for weight, delta in targets.items():
                if tensors[weight].file == name:
                    _add(file, weight, tensors[weight], delta, transposed)
            file.flush()
            os.fsync(file.fileno())
        done += (output / written).stat().st_size
        progress(done, total)
    settings = _model_config(base)
    if head is not None:
        _write_head(base, output, tensors[head[0]], head[1])
    if head is not None or any(name.endswith("lm_head.weight") for name in targets):
        settings["tie_word_embeddings"] = False  # otherwise a loader would replace the head by the embedding
    _write_index(base, output, tensors, files, None if head is None else tensors[head[0]])
    (output / "config.json").write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))
    for name, part in tokenizer_files(base).items():
        if name != "config.json":
            (output / name).write_bytes(part.path.read_bytes() if part.content is None else part.content)
    for name in _OTHERS:
        if (base / name).is_file():
            shutil.copyfile(base / name, output / name)
    progress(total, total)


def size_of_merged(base: Path) -> int:
    """Return the approximate size of a merged model in bytes.

    Raises:
        CannotMerge: see `read_base`.
    """
    return sum((base / name).stat().st_size for name in read_base(base)[1])


def _targets(
    deltas: Mapping[str, Delta], tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Delta], tuple[str, Delta] | None]:
    """Return the changes by name of the weight; a change of a head without weights of its own is separate."""
    targets: dict[str, Delta] = {}
    head: tuple[str, Delta] | None = None
    for module, delta in deltas.items():
        found = _names(f"{module}.weight", tensors)
        if not found and module.rpartition(".")[2] == "lm_head" and config.get("tie_word_embeddings", True):
            shared = [
                name
                for name in tensors
                if re.search(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$", name)
            ]
            if len(shared) == 1:
                head = shared[0], delta
                continue
        if len(found) != 1:
            raise CannotMerge(
                f"the base model's files have {len(found)} weights for the adapted layer {module[:200]!r}: they "
                "store its layers in another form; merge it with PEFT's merge_and_unload"
            )
        targets[found[0]] = delta
    return targets, head


def _names(weight: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of a weight in the files, which may lack or add the prefix of the model."""
    if weight in tensors:
        return [weight]
    return [name for name in tensors if name.endswith(f".{weight}") or weight.endswith(f".{name}")]


def _add(file: BinaryIO, name: str, tensor: Tensor, delta: Delta, transposed: bool) -> None:
    """Add a change to a tensor of an open file, in pieces of rows."""
    left, right = (delta.a.T, delta.b.T) if transposed else (delta.b, delta.a)
    if tensor.shape != (left.shape[0], right.shape[1]):
        raise CannotMerge(
            f"{name} has the shape {list(tensor.shape)}, but the adapter changes one of "
            f"{[left.shape[0], right.shape[1]]}"
        )
    rows = max(1, _PIECE // tensor.shape[1])
    for first in range(0, tensor.shape[0], rows):
        last = min(first + rows, tensor.shape[0])
        merged = _read(file, tensor, first, last) + delta.scale * (left[first:last] @ right)
        _write(file, name, tensor, first, merged)


def _read(file: BinaryIO, tensor: Tensor, first: int, last: int) -> Array:
    """Return rows of a matrix `[last - first, columns]` as float64."""
    kind = np.dtype(_dtype(tensor))
    columns = tensor.shape[1]
    file.seek(tensor.start + first * columns * kind.itemsize)
    raw = np.frombuffer(file.read((last - first) * columns * kind.itemsize), kind)
    if tensor.dtype == "BF16":
        raw = (raw.astype("<u4") << 16).view("<f4")
    return raw.reshape(last - first, columns).astype(np.float64)


def _write(file: BinaryIO, name: str, tensor: Tensor, first: int, values: Array) -> None:
    kind = np.dtype(_dtype(tensor))
    with np.errstate(over="ignore"):
        rounded = _to_bfloat16(values) if tensor.dtype == "BF16" else values.astype(kind)
    finite = np.isfinite(values).all() if tensor.dtype == "BF16" else np.isfinite(rounded).all()
    if not finite:
        raise CannotMerge(f"the merged {name} is not finite in {tensor.dtype}")
    file.seek(tensor.start + first * tensor.shape[1] * kind.itemsize)
    file.write(rounded.tobytes())


def _to_bfloat16(values: Array) -> Array:
    """Round to the nearest bfloat16, ties to even, and return its bits."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _dtype(tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPES:
        raise CannotMerge(f"weights of type {tensor.dtype} cannot be merged; available: {', '.join(_DTYPES)}")
    return _DTYPES[tensor.dtype]


def _write_head(base: Path, output: Path, tensor: Tensor, delta: Delta) -> None:
    """Write an output head of its own: the shared embedding with the change of the head."""
    size = tensor.end - tensor.start
    header = orjson.dumps({"lm_head.weight": {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, size]}})
    header += b" " * (-len(header) % 8)
    with (output / HEAD).open("w+b") as file, (base / tensor.file).open("rb") as source:
        file.write(len(header).to_bytes(8, "little") + header)
        source.seek(tensor.start)
        left = size
        while left and (piece := source.read(min(left, 2**20))):
            file.write(piece)
            left -= len(piece)
        own = Tensor(HEAD, tensor.dtype, tensor.shape, 8 + len(header), 8 + len(header) + size)
        _add(file, "lm_head.weight", own, delta, transposed=False)


def _write_index(
    base: Path, output: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str], head: Tensor | None
) -> None:
    """Write the index of a model with several files.

    Args:
        base: folder of the base model.
        output: folder of the merged model.
        tensors: of the base model.
        files: names of the base's files in the merged model.
        head: the embedding that a head of its own was made of, if there is one.
    """
    if head is None and list(files) == [SINGLE]:
        return
    places = {name: files[tensor.file] for name, tensor in tensors.items()}
    sizes = [tensor.end - tensor.start for tensor in tensors.values()]
    if head is not None:
        places["lm_head.weight"] = HEAD
        sizes.append(head.end - head.start)
    metadata = {"total_size": sum(sizes)}
    if (base / INDEX).exists():
        metadata = {**json.loads((base / INDEX).read_bytes()).get("metadata", {}), **metadata}
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (output / INDEX).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


def _model_config(base: Path) -> dict[str, Any]:
    fields = json.loads((base / "config.json").read_bytes())
    return {name: value for name, value in fields.items() if name != "_name_or_path"}


def publish_merged(base: Path, adapter: Path, output: Path, facts: Mapping[str, Any], progress: Progress) -> Published:
    """Write a merged model as a published folder; after an error or a crash, the folder does not exist."""
    return publish(output, lambda folder: merge(base, adapter, folder, progress), facts)


def main(arguments: list[str]) -> None:
    """Merge, and write lines of JSON: the progress, and then the result or the error."""
    from twinkle_server.environment import die_with_parent

    die_with_parent()
    os.nice(10)
    base, adapter, output = map(Path, arguments[:3])

    def say(**fields: Any) -> None:
        sys.stdout.write(orjson.dumps(fields).decode() + "\n")
        sys.stdout.flush()

    try:
        facts = orjson.loads(arguments[3])
        published = publish_merged(base, adapter, output, facts, lambda done, total: say(done=done, total=total))
        say(size=published.size, digest=published.digest)
    except CannotMerge as error:
        say(error=str(error))
    except OSError as error:
        say(error=f"the merged model could not be written: {error.strerror or type(error).__name__}", server=True)


if __name__ == "__main__":
    main(sys.argv[1:])

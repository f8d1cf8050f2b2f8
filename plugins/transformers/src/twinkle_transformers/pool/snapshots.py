"""Snapshots of adapters on disk: tensors in safetensors, everything else in JSON, never pickle.

The pool keeps the matrices of an adapter in one vector, whose order and padding suit its device. In the file each
matrix has its own name, so that a snapshot can be restored by a pool that arranges them in another way.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinkle.engine import AdapterSpec
from twinkle.errors import CheckpointError
from twinkle_torch.layout import Layout, Shape
from twinkle_transformers.pool.files import shapes_in

TENSORS: Final = "state.safetensors"
STATE: Final = "state.json"
FORMAT: Final = 1
_OLDER: Final = frozenset({"source", "optimizer", "path"})
"""Keys of specifications that older versions wrote: those of the request that created the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    """A copy of an adapter's state, in host memory.

    Attributes:
        spec: how the adapter was created.
        tensors: tensors of `LoraPool.snapshot`.
        state: the rest of it, as JSON data.
    """

    spec: AdapterSpec
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write `state.safetensors` and `state.json` into a folder."""
        layout = _layout_of(self.state)
        named: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if tensor.shape == (layout.size,):
                named |= {f"{name}:{part}": view.contiguous() for part, view in _matrices(layout, tensor)}
            else:
                named[name] = tensor
        save_file(named, folder / TENSORS)
        vectors = [name for name, tensor in self.tensors.items() if tensor.shape == (layout.size,)]
        document = {
            "format": FORMAT, "create": _spec_as_dict(self.spec), "vectors": vectors, "state": dict(self.state),
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(document, indent=2, sort_keys=True), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """A snapshot as it is on disk.

    Attributes:
        spec: how the adapter was created.
        vectors: names of the tensors that were split into matrices.
        tensors: tensors of the file.
        state: see `AdapterSnapshot`.
    """

    spec: AdapterSpec
    vectors: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "WrittenSnapshot":
        """Read a folder that `AdapterSnapshot.write` filled.

        Raises:
            CheckpointError: files are missing or damaged, or were written by a newer version.
        """
        try:
            document = _read_document(folder)
            vectors, state = tuple(document["vectors"]), document["state"]
            spec = _spec_of(document["create"], folder)
            tensors = load_file(folder / TENSORS)
            if len(set(vectors)) < len(vectors):
                raise ValueError("a vector is named twice")
            if not isinstance(state, dict) or "optimizer" not in state:
                raise ValueError("the state is incomplete")
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise _damaged(folder, error) from error
        return cls(spec, vectors, tensors, state)

    def arranged_as(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a snapshot for `LoraPool.restore`, its vectors arranged as those of the adapter to be replaced.

        Args:
            own: `state` of that adapter's own snapshot.

        Raises:
            CheckpointError: the snapshot is of an adapter of other layers or sizes, or tensors are missing.
        """
        try:
            layout = _layout_of(own)
            if dict(_shapes_of(self.state)) != dict(layout.shapes):
                raise CheckpointError(
                    "cannot restore the snapshot: its layers, ranks or sizes differ from those of the adapter"
                )
            parts = {
                f"{name}:{part}" for name in self.vectors for part, _ in _matrices(layout, torch.empty(layout.size))
            }
            tensors = {name: tensor for name, tensor in self.tensors.items() if name not in parts}
            tensors |= {name: self._joined(name, layout) for name in self.vectors}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"cannot restore the snapshot: its files are damaged ({error})") from error
        state = {**self.state, "layout": own["layout"], "rank_multiple": own["rank_multiple"]}
        return {"tensors": tensors, "state": state}

    def _joined(self, name: str, layout: Layout) -> Tensor:
        whole = torch.zeros(layout.size)
        for part, view in _matrices(layout, whole):
            tensor = self.tensors[f"{name}:{part}"]
            if tensor.shape != view.shape or not tensor.is_floating_point():
                raise ValueError(f"{name}:{part} is {tensor.dtype} {list(tensor.shape)}, not {list(view.shape)}")
            view.copy_(tensor)
        return whole


def read_spec(folder: Path) -> AdapterSpec | None:
    """Return the specification in a snapshot; None if the folder holds none.

    Raises:
        CheckpointError: the snapshot is damaged, or was written by a newer version.
    """
    if not (folder / STATE).is_file():
        return None
    try:
        return _spec_of(_read_document(folder)["create"], folder)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(folder, error) from error


def _read_document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    if document["format"] != FORMAT:
        raise CheckpointError(
            f"cannot read the snapshot in {folder}: its format is {document['format']!r}, this version reads {FORMAT}"
        )
    return document


def _damaged(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot read the snapshot in {folder}: its files are damaged or incomplete ({error})")


def _spec_as_dict(spec: AdapterSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in AdapterSpec.__dataclass_fields__}


def _spec_of(values: Mapping[str, Any], folder: Path) -> AdapterSpec:
    """Read a specification, and check it before an adapter is created from it: a rank may be beyond all memory."""
    if not isinstance(values, dict):
        raise TypeError("the specification is not an object")
    spec = AdapterSpec(**{name: value for name, value in values.items() if name not in _OLDER})
    integers, switches = (spec.rank, spec.seed), (spec.train_attn, spec.train_mlp, spec.train_unembed)
    numbers = (spec.alpha, spec.dropout)
    if (
        any(type(value) is not int for value in integers)
        or any(type(value) is not bool for value in switches)
        or any(type(value) not in (int, float) for value in numbers)
    ):
        raise TypeError(f"the specification has values of wrong types: {dict(values)}")
    if spec.rank > max((math.prod(shape) for shape in shapes_in(folder / TENSORS).values()), default=0):
        raise ValueError(f"rank is {spec.rank}, more than the number of weights")
    return spec


def _layout_of(state: Mapping[str, Any]) -> Layout:
    return Layout.of(_shapes_of(state), rank_multiple=state["rank_multiple"])


def _shapes_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    return ((name, Shape(*sizes)) for name, *sizes in state["layout"])


def _matrices(layout: Layout, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of A and of B transposed at each place, without the rows that pad the rank."""
    for place, entry in layout.entries.items():
        rank = layout.shapes[place].rank
        yield f"{place}.A", entry.down_of(whole)[..., :rank, :]
        yield f"{place}.B", entry.up_of(whole)[..., :rank, :]

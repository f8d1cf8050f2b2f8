"""A model's state on the disk: tensors as safetensors, everything else as JSON; never a pickle.

The pool keeps an adapter's matrices in one vector, in an order and with gaps that suit its device. On the disk each has
its name, so that a state fits whatever the pool of a later day makes of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinkle_server.engine.backend import UserError
from twinkle_server.payloads import Create
from twinkle_torch.layout import Layout, Shape

TENSORS: Final = "state.safetensors"
STATE: Final = "state.json"
FORMAT: Final = 1
_BROKEN: Final = "the files of this checkpoint are damaged or incomplete; save it again"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A copy of a model's state, which later operations do not change.

    Attributes:
        create: how the model was made.
        tensors: by name, on the host, as the pool's snapshot has them.
        state: what JSON can hold.
    """

    create: Create
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write it into a folder that is there; any thread may."""
        layout = _layout_of(self.state)
        named: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if tensor.shape == (layout.size,):
                named |= {f"{name}:{part}": view.contiguous() for part, view in _matrices(layout, tensor)}
            else:
                named[name] = tensor
        save_file(named, folder / TENSORS)
        vectors = [name for name, tensor in self.tensors.items() if tensor.shape == (layout.size,)]
        said = {"format": FORMAT, "create": asdict(self.create), "vectors": vectors, "state": dict(self.state)}
        (folder / STATE).write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


@dataclass(frozen=True, slots=True)
class ReadState:
    """What `SavedState.write` wrote.

    Attributes:
        create: how the model was made.
        vectors: names of those tensors of the snapshot that were taken apart.
        tensors: as they are on the disk.
        state: see `SavedState`.
    """

    create: Create
    vectors: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> "ReadState":
        """Read a folder.

        Raises:
            UserError: something is missing, damaged, or of a later version.
        """
        try:
            said = orjson.loads((folder / STATE).read_bytes())
            version = said["format"]
            create, vectors, state = Create(**said["create"]), tuple(said["vectors"]), dict(said["state"])
            tensors = load_file(folder / TENSORS)
            _check(create, vectors, tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(_BROKEN) from error
        if version != FORMAT:
            raise UserError(f"this checkpoint has the format {version!r}, and this service reads {FORMAT}")
        return cls(create, vectors, tensors, state)

    def snapshot_for(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a snapshot that the pool puts in place of an adapter's state.

        Args:
            own: `state` of that adapter's own snapshot.

        Raises:
            UserError: the state is of an adapter of other places or sizes, or something of it is missing.
        """
        try:
            mine = _layout_of(own)
            if dict(_shapes_of(self.state)) != dict(mine.shapes):
                raise UserError("the checkpoint is of a model with other layers, ranks or sizes than this one")
            parts = {f"{name}:{part}" for name in self.vectors for part, _ in _matrices(mine, torch.empty(mine.size))}
            tensors = {name: tensor for name, tensor in self.tensors.items() if name not in parts}
            tensors |= {name: self._joined(name, mine) for name in self.vectors}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(_BROKEN) from error
        state = {**self.state, "layout": own["layout"], "rank_multiple": own["rank_multiple"]}
        return {"tensors": tensors, "state": state}

    def _joined(self, name: str, layout: Layout) -> Tensor:
        whole = torch.zeros(layout.size)
        for part, view in _matrices(layout, whole):
            found = self.tensors[f"{name}:{part}"]
            if found.shape != view.shape or not found.is_floating_point():
                raise ValueError(f"{name}:{part} is {found.dtype} {list(found.shape)}, not {list(view.shape)}")
            view.copy_(found)
        return whole


def is_state(folder: Path) -> bool:
    """Say whether a folder holds a state, and not an adapter's weights alone."""
    return (folder / STATE).is_file()


def _check(create: Create, vectors: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
    """Refuse what no state says: a model is made of it before its tensors are looked at."""
    whole = (create.rank, create.seed)
    switches = (create.train_attn, create.train_mlp, create.train_unembed)
    if any(type(value) is not int for value in whole) or any(type(value) is not bool for value in switches):
        raise TypeError(f"a model of {whole} and {switches}")
    if create.rank > max((tensor.numel() for tensor in tensors.values()), default=0):
        raise ValueError(f"rank {create.rank} is more than the file has numbers")
    if len(set(vectors)) < len(vectors):
        raise ValueError("a vector is named twice")


def _layout_of(state: Mapping[str, Any]) -> Layout:
    return Layout.of(_shapes_of(state), rank_multiple=state["rank_multiple"])


def _shapes_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    return ((name, Shape(*sizes)) for name, *sizes in state["layout"])


def _matrices(layout: Layout, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B (transposed) of each place as views, without the rows that a rank was rounded up by."""
    for place, entry in layout.entries.items():
        rank = layout.shapes[place].rank
        yield f"{place}.A", entry.down_of(whole)[..., :rank, :]
        yield f"{place}.B", entry.up_of(whole)[..., :rank, :]

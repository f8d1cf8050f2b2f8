"""Patches of one adapter: they change the embeddings of its own rows in training passes, and nothing else.

Such a patch has the class attribute `per_adapter`, and a method `change_embeddings(embeddings, draw)`: embeddings
`[T, H]` of one row, and `draw(features)`, which returns numbers in [0, 1) `[T, features]` that are functions of the
adapter's seed, the number of the operation, the row and the position, so that neighbours and replays change nothing.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import ArgumentError
from twinkle_transformers.noise import token_keys, uniforms_from
from twinkle_transformers.pool.work import MicroBatch


@dataclass(frozen=True, slots=True)
class PatchedRow:
    """A row whose embeddings are changed.

    Attributes:
        start: index of its first token in the stream.
        keys: int64 `[T]`, see `token_keys`.
        patches: of its adapter.
    """

    start: int
    keys: Tensor
    patches: Sequence[Any]

    def change(self, embeddings: Tensor) -> Tensor:
        """Return the changed embeddings `[T, H]`."""
        for patch in self.patches:
            site = zlib.crc32(f"patch {type(patch).__name__}".encode())
            changed = patch.change_embeddings(embeddings, _Draw(self.keys, site))
            if changed.shape != embeddings.shape:
                raise ArgumentError(
                    f"{type(patch).__name__}.change_embeddings must return {list(embeddings.shape)}, got "
                    f"{list(changed.shape)}"
                )
            embeddings = changed.to(embeddings.dtype)
        return embeddings


@dataclass(frozen=True, slots=True)
class _Draw:
    keys: Tensor
    site: int

    def __call__(self, features: int) -> Tensor:
        return uniforms_from(self.keys, self.site, features)


def is_patched(part: MicroBatch) -> bool:
    """Return whether the embeddings of a micro-batch are changed."""
    return part.work.training and part.work.tenant is not None and bool(part.work.tenant.patches)


def keys_of(part: MicroBatch) -> Tensor:
    """Return the key of each token of a micro-batch, int64 `[S]`; see `token_keys`."""
    sizes = torch.tensor([len(s) for s in part.sequences])
    rows = torch.repeat_interleave(torch.arange(len(sizes)) + part.first, sizes)
    positions = torch.cat([torch.arange(len(s)) for s in part.sequences])
    seed = part.work.tenant.group.seed if part.work.tenant is not None else 0
    return token_keys(seed or 0, part.work.number, rows, positions)


def patched_rows(parts: Sequence[MicroBatch], device: torch.device) -> list[PatchedRow]:
    """Return the rows that patches change, of micro-batches in stream order whose tokens were arranged."""
    found = []
    at = 0
    for part in parts:
        if is_patched(part) and part.work.tenant is not None:
            start, patches = at, tuple(part.work.tenant.patches)
            for keys in torch.split_with_sizes(keys_of(part), [len(s) for s in part.sequences]):
                found.append(PatchedRow(start, keys.to(device), patches))
                start += len(keys)
        at += part.computed
    return found


@contextmanager
def changed_embeddings(module: nn.Module, rows: Sequence[PatchedRow]) -> Iterator[None]:
    """Change the embeddings of rows in the forwards of a block, which run the stream in one or several calls."""
    if not rows:
        yield
        return
    first = 0

    def change(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        nonlocal first
        start, first = first, first + output.shape[1]
        pieces, at = [], 0
        for row in rows:
            begin = row.start - start
            if not 0 <= begin < output.shape[1]:
                continue
            end = begin + len(row.keys)
            pieces += [output[0, at:begin], row.change(output[0, begin:end])]
            at = end
        return torch.cat([*pieces, output[0, at:]])[None]

    handle = module.get_input_embeddings().register_forward_hook(change)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()

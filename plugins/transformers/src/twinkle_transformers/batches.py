"""Batches as the module sees them: without padding, and with shared prefixes computed once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle.logging import get_logger
from twinkle_torch.packing import Layout, Side, unpack
from twinkle_torch.segments import Segments
from twinkle_transformers.segments import Segmenter
from twinkle_transformers.shared_prefixes import PrefixPlan, plan_prefixes


class PackedBatch(dict[str, Any]):
    """A padded batch `[sequences, longest]` that runs through the model as one row without padding.

    Attributes:
        lengths: number of tokens of each sequence.
        places: int64 `[sum of lengths]`, ascending indices of the tokens in the flattened batch.
    """

    def __init__(self, batch: Mapping[str, Any], layout: Layout, side: Side) -> None:
        super().__init__(unpack(batch, layout, side))
        self.lengths = layout.lengths
        self.places = layout.places(side)

    @property
    def width(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    def segments(self, device: torch.device) -> Segments:
        """Return the boundaries of the sequences in the row."""
        return Segments.of(self.lengths, device)

    def join(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of a forward as one row: `[1, T, ...]` of `[sequences, longest, ...]`.

        Raises:
            Unsupported: an argument has no entry for each token (images, say).
        """
        size = self["input_ids"].shape[:2]
        for name, value in arguments.items():
            if value.shape[:2] != size:
                raise Unsupported(
                    f"{name!r} {list(value.shape)} has no entry for each token; batches without padding hold text "
                    "alone: leave padding_free out and give each sequence as a row of its own"
                )
        kept = {name: value for name, value in arguments.items() if name != "attention_mask"}
        return {name: value.flatten(0, 1)[self.places.to(value.device)][None] for name, value in kept.items()}

    def find(self, places: Tensor) -> Tensor:
        """Return the indices in the joined row of tokens at `places` (int64 `[N]`, on the CPU) of the padded batch."""
        return torch.searchsorted(self.places, places)

    def pad_rows(self, values: Tensor) -> Tensor:
        """Return `[sequences, longest, ...]` of `[1, T, ...]`, with 0 where nothing was computed."""
        size, rest = self["input_ids"].shape[:2], values.shape[2:]
        out = values.new_zeros((size.numel(), *rest))
        return out.index_put((self.places.to(values.device),), values[0]).view(*size, *rest)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a pass: number of positions, length of the longest sequence, and whether it is masked or packed."""

    tokens: int
    width: int
    masked: bool
    packed: bool = False


def positions(batch: Mapping[str, Any]) -> Size:
    """Return the size of the pass of a batch."""
    if isinstance(batch, PackedBatch):
        return Size(sum(batch.lengths), batch.width, False, True)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return Size(ids.numel(), ids.shape[1], mask is not None and not bool(mask.all()))


def without_padding(batch: Any, *, left: bool) -> Any:
    """Return a batch as losses and metrics see it, with one padded row for each sequence and an `attention_mask`.

    Args:
        batch: collated tensors; if rows hold several sequences, or there is no mask, each becomes a row of its own.
        left: whether sequences are padded on the left.

    Returns:
        a `PackedBatch` if there are more sequences than rows; the model then processes them in one row.

    Raises:
        DataError: positions within a row restart at another number than 0.
    """
    layout = Layout.of(batch)
    side: Side = "left" if left else "right"
    if layout.packed:
        return PackedBatch(batch, layout, side)
    return batch if "attention_mask" in batch else unpack(batch, layout, side)


_TEXT = frozenset({"input_ids", "attention_mask", "position_ids"})


class SharedBatch(PackedBatch):
    """A padded batch `[rows, longest]` that runs through the model as one row, with shared prefixes only once.

    Attributes:
        lengths: number of tokens of each segment of the row: a shared prefix, or the rest of a sequence after one.
        index: int64 `[sum of the rows' lengths]`, index in the row of each token of the sequences.
    """

    def __init__(self, batch: dict[str, Any], plan: PrefixPlan, places: Tensor) -> None:
        dict.__init__(self, batch)
        self._plan = plan
        self.lengths, self.places = plan.lengths, places
        self.index = torch.cat([torch.from_numpy(indices) for indices in plan.index])

    @property
    def width(self) -> int:
        """Length of the longest row."""
        return max(len(indices) for indices in self._plan.index)

    def segments(self, device: torch.device) -> Segments:
        """Return the boundaries of the segments, and the prefix that each continues."""
        return Segments.of(self.lengths, device, parents=self._plan.parents)

    def join(self, arguments: Any) -> dict[str, Tensor]:
        """Return the stream with its positions, `[1, T]` each."""
        ids = arguments["input_ids"]
        stream = ids.new_empty(sum(self.lengths))
        stream[self.index.to(ids.device)] = ids.flatten()[self.places.to(ids.device)]
        return {"input_ids": stream[None], "position_ids": self.segments(ids.device).positions[None]}

    def find(self, places: Tensor) -> Tensor:
        """Return the indices in the stream of tokens at `places` of the padded batch."""
        return self.index[torch.searchsorted(self.places, places)]

    def pad_rows(self, values: Tensor) -> Tensor:
        """Return `[rows, longest, ...]` of `[1, T, ...]`, with 0 where nothing was computed."""
        return super().pad_rows(values[:, self.index.to(values.device)])


def check_sharing(share_prefixes: bool | str) -> bool | str:
    """Return the option `share_prefixes`, or refuse an invalid value."""
    if not isinstance(share_prefixes, bool) and share_prefixes != "auto":
        raise ArgumentError(f'share_prefixes must be True, False or "auto", got {share_prefixes!r}')
    return share_prefixes


def sharing_prefixes(
    batch: dict[str, Any], segmenter: Segmenter, taken: Collection[str], *, required: bool = False
) -> dict[str, Any]:
    """Return a batch that computes shared prefixes once, or the batch itself if that saves nothing.

    Args:
        batch: a batch that `without_padding` returned.
        segmenter: segmenter of the model.
        taken: names of the tensors that the model takes.
        required: raise an error if the model cannot share prefixes.

    Raises:
        Unsupported: sharing is required, and the model cannot do it.
    """
    others = [name for name in taken if name in batch and name not in _TEXT and isinstance(batch[name], Tensor)]
    if others or len(batch["input_ids"]) < 2:
        return batch
    lengths, places = _rows(batch)
    if places is None or not _counts_from_zero(batch.get("position_ids"), lengths, places):
        return batch
    plan = plan_prefixes(batch["input_ids"].flatten()[places].split(lengths))
    if not plan.saved:
        return batch
    if refusal := segmenter.check_prefixes():
        if required:
            raise Unsupported(f'{refusal}, or use share_prefixes="auto", which computes rows whole here')
        get_logger().debug("%s; rows are computed whole", refusal)
        return batch
    return SharedBatch(batch, plan, places)


def _rows(batch: dict[str, Any]) -> tuple[list[int], Tensor | None]:
    """Return the rows' lengths and the indices of their tokens; None if the mask of a row has holes or is empty."""
    if isinstance(batch, PackedBatch):
        return list(batch.lengths), batch.places
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1)
    runs = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    whole = bool((runs == 1).all())
    return lengths.tolist(), mask.flatten().nonzero().squeeze(-1) if whole else None


def _counts_from_zero(positions: Tensor | None, lengths: list[int], places: Tensor) -> bool:
    if positions is None:
        return True
    if positions.ndim != 2:
        return False
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    plain = torch.cat([torch.arange(past - first) for first, past in pairwise(ends)])
    return bool((positions.flatten()[places].cpu() == plain).all())

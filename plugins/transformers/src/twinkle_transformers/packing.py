"""Batches whose rows the model sees one after the other, while losses and metrics see one padded row a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import Unsupported
from twinkle_torch.packing import Layout, Side, unpack
from twinkle_torch.segments import Segments


class PackedBatch(dict[str, Any]):
    """A padded batch `[sequences, longest]` that goes through the model without its padding.

    Attributes:
        lengths: tokens of each sequence.
        places: int64 `[sum of lengths]`, where they lie in the flattened batch, ascending.
    """

    def __init__(self, batch: Mapping[str, Any], layout: Layout, side: Side) -> None:
        super().__init__(unpack(batch, layout, side))
        self.lengths = layout.lengths
        self.places = layout.places(side)

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def segments(self, device: torch.device) -> Segments:
        """Return where the sequences lie in the row that the model sees."""
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
        """Return where tokens at these places (int64 `[N]`, on the CPU) of the padded batch lie in the joined row."""
        return torch.searchsorted(self.places, places)

    def spread(self, values: Tensor) -> Tensor:
        """Return `[sequences, longest, ...]` of `[1, T, ...]`, with 0 where nothing was computed."""
        size, rest = self["input_ids"].shape[:2], values.shape[2:]
        out = values.new_zeros((size.numel(), *rest))
        return out.index_put((self.places.to(values.device),), values[0]).view(*size, *rest)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a pass is: positions in all, in its longest sequence, and whether they are masked or packed."""

    tokens: int
    width: int
    masked: bool
    packed: bool = False


def positions(batch: Mapping[str, Any]) -> Size:
    """Return how large the pass of a batch is."""
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
        a `PackedBatch` where there are more sequences than rows, which the model then sees one after the other.

    Raises:
        DataError: positions within a row go back to something else than 0.
    """
    layout = Layout.of(batch)
    side: Side = "left" if left else "right"
    if layout.packed:
        return PackedBatch(batch, layout, side)
    return batch if "attention_mask" in batch else unpack(batch, layout, side)

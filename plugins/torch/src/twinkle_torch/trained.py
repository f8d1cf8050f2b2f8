"""Trained positions of a batch, and conversion of per-row arguments of losses and metrics to `[B, T]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch
from twinkle.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Trained:
    """The trained positions of a batch.

    Attributes:
        loss: name of the loss (or metric) that asks, for errors.
        mask: bool `[B, T]` on the device of the log-probabilities.
        counts: trained positions of each row.
        real: bool `[B, T]` on the CPU, the tokens of each row (its `attention_mask`); None where the batch has none.
    """

    loss: str
    mask: "Tensor"
    counts: tuple[int, ...]
    real: "Tensor | None"

    @classmethod
    def of(cls, inputs: InputBatch, logps: "Tensor", ignore_index: int, loss: object) -> "Trained":
        """Find the positions whose label is neither -100 nor `ignore_index`.

        Raises:
            DataError: `labels` are not one token for each position of `logps`.
        """
        labels, what = inputs["labels"], type(loss).__name__
        shape = tuple(getattr(labels, "shape", ()))
        if shape != tuple(logps.shape) or len(shape) != 2 or labels.is_floating_point():
            raise DataError(
                f"{what}: labels are {list(shape) or type(labels).__name__} and logps {list(logps.shape)}; it needs "
                "rows with one label (a token or -100) for each token"
            )
        mask, real = (labels != ignore_index) & (labels != -100), inputs.get("attention_mask")
        counts = tuple(mask.sum(1).tolist())
        return cls(what, mask.to(logps.device), counts, None if real is None else real.bool().cpu())

    @property
    def sequences(self) -> int:
        """Rows that train something."""
        return sum(count > 0 for count in self.counts)

    def fill(self, values: "Tensor") -> "Tensor":
        """Return `values` `[B, T]` with 0 at untrained positions, which may contain NaN."""
        import torch

        return torch.where(self.mask, values, 0.0)

    def sums(self, terms: "Tensor") -> "Tensor":
        """Return `[B]`: the sum of `terms` `[B, T]` over each row's trained positions."""
        return self.fill(terms).sum(1)

    def means(self, terms: "Tensor") -> "Tensor":
        """Return `[B]`: the mean of `terms` `[B, T]` over each row's trained positions, 0 where a row has none."""
        sums = self.sums(terms)
        return sums / sums.new_tensor(self.counts).clamp(min=1)

    def align(self, name: str, value: Any, like: "Tensor", *, broadcast: bool = True) -> "Tensor":
        """Return a per-row argument as `[B, T]`: its numbers at the trained positions, 0 elsewhere, without gradient.

        Args:
            name: of the argument, for errors.
            value: a tensor or array `[B, T]`, `[B, 1]` or `[B]`, a list of numbers, or a list of lists. A row with
                one number has it at each trained position; as many as trained positions go there in order (what a
                sampler returns); as many as the row has tokens, or T and more (cut to T), stand at their positions.
            like: gives dtype and device.
            broadcast: whether one number may be used for several trained positions.

        Raises:
            ArgumentError: there is not one entry per row, or its length is none of these; names row and lengths.
        """
        import torch

        rows, width = self.mask.shape
        self._check_rows(name, value, rows)
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if broadcast and shape in ((rows,), (rows, 1)):
            placed = value.detach().reshape(rows, 1).expand(rows, width)
        elif len(shape) == 2 and shape[1] >= width > 1:
            placed = value.detach()[:, self.window(shape[1])]
        else:
            entries = value.detach().cpu() if shape else value
            placed = self._from_rows(name, entries, like.dtype, broadcast)
        return self.fill(placed.to(like.device, like.dtype))

    def aligned(self, values: Mapping[str, Any], like: "Tensor", *, broadcast: bool = True) -> "dict[str, Tensor]":
        """Return those of the per-row arguments that are not None, each as `align` does, if all numbers are finite.

        Raises:
            ArgumentError: as `align`; or a number at a trained position is NaN or infinite, named with its row.
        """
        import torch

        given = {name: value for name, value in values.items() if value is not None}
        found = {name: self.align(name, value, like, broadcast=broadcast) for name, value in given.items()}
        wrong = ~torch.isfinite(torch.stack(list(found.values()))) if found else self.mask.new_zeros(0)
        if bool(wrong.any()):
            which, row, column = wrong.nonzero()[0].tolist()
            name = list(found)[which]
            raise ArgumentError(
                f"{self.loss}: {name} of row {row} holds {float(found[name][row, column])} at a trained token; leave "
                "the row out, or mend what made the number (a reward that is none, say)"
            )
        return found

    def _from_rows(self, name: str, entries: Any, dtype: Any, broadcast: bool) -> "Tensor":
        import torch

        mask, placed = self.mask.cpu(), []
        for row, entry in enumerate(entries):
            placed.append(self._place(name, row, self._entry(name, row, entry, dtype), mask[row], broadcast))
        return torch.stack(placed)

    def _check_rows(self, name: str, value: Any, rows: int) -> None:
        if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
            raise ArgumentError(
                f"{self.loss}: {name} is a {type(value).__name__}; give a tensor [B, T], or a list with one entry a row"
            )
        if len(value) != rows:
            raise ArgumentError(
                f"{self.loss}: {name} has {len(value)} entries, the batch has {rows} rows; give one entry a row"
            )

    def _entry(self, name: str, row: int, entry: Any, dtype: Any) -> "Tensor":
        import torch

        found = f"{self.loss}: {name} of row {row}"
        try:
            numbers = torch.as_tensor(entry, dtype=dtype).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"{found} is {entry!r:.60}, no list of numbers; give its log-probabilities or advantages "
                "(ref_logps='base' is for models with many adapters)"
            ) from error
        if numbers.dim() > 1:
            raise ArgumentError(
                f"{found} has the shape {list(numbers.shape)}; give one number a token (of a sampler's logprobs "
                "[entry[0][1] for entry in sequence.logprobs])"
            )
        return numbers.reshape(-1)

    def _place(self, name: str, row: int, numbers: "Tensor", mask: "Tensor", broadcast: bool) -> "Tensor":
        placed = numbers.new_zeros(len(mask))
        one = broadcast and len(numbers) == 1
        placed[mask] = numbers if one else numbers[self.pick(name, row, len(numbers), broadcast=broadcast)]
        return placed

    def pick(self, name: str, row: int, found: int, *, broadcast: bool = False) -> "Tensor":
        """Return which of a row's `found` numbers (or lines of numbers) belong to its trained positions, in order.

        Raises:
            ArgumentError: they are as many as neither its trained positions nor its tokens, and fewer than T.
        """
        import torch

        mask = self.mask[row].cpu()
        real = None if self.real is None else self.real[row]
        if found == self.counts[row]:
            return torch.arange(found)
        if real is not None and found == int(real.sum()):
            return (real.cumsum(0) - 1)[mask]
        if found >= len(mask):
            return torch.arange(found)[self.window(found)][mask]
        raise ArgumentError(self._mismatch(name, row, found, None if real is None else int(real.sum()), broadcast))

    def window(self, found: int) -> slice:
        """Return which of `found` columns belong to this batch: the last ones where rows are padded on the left."""
        width = self.mask.shape[1]
        left = self.real is not None and not bool(self.real[:, 0].all())
        return slice(found - width, None) if left else slice(0, width)

    def _mismatch(self, name: str, row: int, found: int, tokens: int | None, broadcast: bool) -> str:
        width, count = self.mask.shape[1], self.counts[row]
        wanted = [f"{count} (its trained tokens)"] + ["1 (the same for all)"] * broadcast
        wanted += [] if tokens is None else [f"{tokens} (its tokens)"]
        return (
            f"{self.loss}: {name} of row {row} has {found} numbers; give {', '.join(wanted)}, or at least {width} (the "
            "width of the batch)"
        )

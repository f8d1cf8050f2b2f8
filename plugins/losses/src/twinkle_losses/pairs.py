"""Rows in pairs, `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, and which of them train."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch
from twinkle.errors import ArgumentError, DataError
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a batch.

    Attributes:
        loss: name of the loss, for errors.
        trained: for each pair, whether its rows train anything.
    """

    loss: str
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, where: Trained) -> "Pairs":
        """Read the rows as pairs.

        Raises:
            ArgumentError: their number is odd.
            DataError: only one row of a pair has trained tokens.
        """
        counts = where.counts
        if len(counts) % 2:
            raise ArgumentError(
                f"{where.loss}: the batch has {len(counts)} rows, which are not pairs; give rows in the order [chosen, "
                "rejected, chosen, rejected, ...], and micro-batches of an even number of rows"
            )
        for row, (chosen, rejected) in enumerate(zip(counts[::2], counts[1::2], strict=True)):
            if bool(chosen) != bool(rejected):
                empty = 2 * row + (1 if chosen else 0)
                raise DataError(
                    f"{where.loss}: row {empty} of the batch has no trained token, but the other row of its pair has; "
                    "leave such pairs out, or raise max_length if the answer was cut off"
                )
        return cls(where.loss, tuple(count > 0 for count in counts[::2]))

    @property
    def count(self) -> int:
        """Number of pairs that train something."""
        return sum(self.trained)

    def split(self, rows: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return the chosen and the rejected half `[P]` of `[B]`."""
        return rows[0::2], rows[1::2]

    def total(self, terms: "Tensor") -> "Tensor":
        """Return the sum of `terms` `[P]` over the pairs that train."""
        import torch

        return torch.where(torch.tensor(self.trained, device=terms.device), terms, 0.0).sum()

    def numbers(self, terms: "Mapping[str, Tensor]") -> dict[str, float]:
        """Return the sums of several such terms as plain numbers, with one wait for the device."""
        import torch

        return dict(zip(terms, torch.stack([self.total(values) for values in terms.values()]).tolist(), strict=True))

    def interleave(self, given: Mapping[str, Any], like: "Tensor") -> "Tensor":
        """Return two arguments with one number a pair, of the chosen and of the rejected rows, as one a row: `[B]`.

        Raises:
            ArgumentError: one has no such numbers, or one of a pair that trains is NaN or infinite; names it.
        """
        import torch

        halves = [self._half(name, value, like) for name, value in given.items()]
        return torch.stack(halves, dim=1).flatten()

    def _half(self, name: str, value: Any, like: "Tensor") -> "Tensor":
        import torch

        pairs, found = len(self.trained), f"{self.loss}: {name}"
        try:
            numbers = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"{found} are not numbers ({error}); give one per pair") from error
        if tuple(numbers.shape) not in ((pairs,), (pairs, 1)):
            raise ArgumentError(
                f"{found} has the shape {list(numbers.shape)}, the batch has {pairs} pairs; give one number a pair: "
                "the sum over the row's trained tokens"
            )
        numbers = numbers.reshape(-1)
        for pair in (~torch.isfinite(numbers)).nonzero().flatten().tolist():
            if self.trained[pair]:
                raise ArgumentError(f"{found} of pair {pair} is {float(numbers[pair])}; leave the pair out")
        return numbers


def weigh(terms: "Tensor", inputs: InputBatch) -> "Tensor":
    """Return `terms` `[B, T]` times the batch's `loss_scale`, where it has one."""
    scale = inputs.get("loss_scale")
    return terms if scale is None else terms * scale.to(terms)


def reward_numbers(beta: float, chosen: "Tensor", rejected: "Tensor") -> "dict[str, Tensor]":
    """Return what is worth logging of each pair, `[P]` each: rewards are `beta` times what the pair's rows score."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "rewards/margins": beta * (chosen - rejected),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
    }


def logp_numbers(chosen: "Tensor", rejected: "Tensor") -> "dict[str, Tensor]":
    """Return the log-probabilities of each pair's rows under the names that they are logged by."""
    return {"logps/chosen": chosen.detach(), "logps/rejected": rejected.detach()}

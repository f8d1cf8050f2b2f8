"""What preference losses without a reference share: all but the term of a pair."""

from abc import abstractmethod
from typing import TYPE_CHECKING

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_losses.options import score
from twinkle_losses.pairs import Pairs, logp_numbers, weigh
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

Halves = tuple["Tensor", "Tensor"]
"""A number of each chosen and of each rejected row, `[P]` each."""


class PairLoss(Loss):
    """A term for each pair of rows, summed over pairs; a subclass gives the term."""

    rows_together = 2
    ignore_index: int

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch of whole pairs.

        Args:
            inputs: `labels` int64 `[B, T]`, B even; optional `loss_scale` float32 `[B, T]`.
            outputs: `logps` float32 `[B, T]`.

        Raises:
            ArgumentError: B is odd.
            DataError: only one row of a pair has trained tokens.
            TrainingStateError: the forward was of another task.
        """
        logps = score(inputs, outputs, "logps", self)
        where = Trained.of(inputs, logps, self.ignore_index, self)
        pairs = Pairs.of(where)
        scores = weigh(where.fill(logps), inputs)
        sums = pairs.split(scores.sum(1))
        terms, numbers = self._terms(sums, pairs.split(where.means(scores)))
        return LossOutput(pairs.total(terms), pairs.count, pairs.numbers(logp_numbers(*sums) | numbers))

    @abstractmethod
    def _terms(self, sums: Halves, means: Halves) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return the terms `[P]`, and what is worth logging of each pair, `[P]` each.

        Args:
            sums: of logp_t over the trained tokens of each row.
            means: the same, divided by the number of these tokens.
        """

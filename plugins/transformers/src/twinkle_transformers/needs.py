"""What a forward must prepare."""

from collections.abc import Callable
from dataclasses import dataclass

from twinkle.loss import FusedLoss, HeadProduct


@dataclass(frozen=True, slots=True)
class Needs:
    """What a forward must prepare beside `logps`, from the loss, the metrics and the call.

    Attributes:
        logits: whole logits.
        logps: whether log-probabilities have a gradient, too, where the logits are whole.
        entropies: the entropy at each trained position.
        uniform_logps: the mean log-probability of the vocabulary at each trained position.
        predictions: the most probable token at each trained position.
        top: how many of the most probable tokens at each trained position.
        embeddings: one vector a row, and nothing else.
        skip_weight_zero: positions with `loss_scale` 0 need no scores.
        chunk_tokens: positions whose logits exist at one time; None is the head's own choice.
        softcap: what the loss says that the model does to its logits; None says nothing.
        fuse: computes the loss from the product of hidden states and head, or declines.
    """

    logits: bool = False
    logps: bool = True
    entropies: bool = False
    uniform_logps: bool = False
    predictions: bool = False
    top: int = 0
    embeddings: bool = False
    skip_weight_zero: bool = False
    chunk_tokens: int | None = None
    softcap: float | None = None
    fuse: Callable[[HeadProduct], FusedLoss | None] | None = None

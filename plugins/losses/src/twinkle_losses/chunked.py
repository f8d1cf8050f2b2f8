"""Cross entropy with a limit on the number of logits in memory."""

from typing import Literal

from twinkle_losses.cross_entropy import CrossEntropyLoss
from twinkle_losses.options import whole


class ChunkedCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss`, computed `chunk_size` tokens at a time: the same numbers, another peak of memory.

    The head always works in chunks, and never holds `[tokens, vocabulary]`. A chunk takes about `2 * chunk_size * V`
    numbers of float32; larger ones are a little faster on a GPU.

    Args:
        chunk_size: tokens whose logits exist at one time, at least 1.
        ignore_index: see `CrossEntropyLoss`.
        reduction: see `CrossEntropyLoss`.
        dft: see `CrossEntropyLoss`.
        label_smoothing: see `CrossEntropyLoss`.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        chunk_size: int = 1024,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        dft: bool = False,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(ignore_index, reduction, dft, label_smoothing=label_smoothing)
        self.chunk_tokens = whole(self, "chunk_size", chunk_size, least=1)

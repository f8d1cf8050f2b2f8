"""NEFTune: noise on the embeddings of training rows, which makes instruction tuning generalize better."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.errors import ArgumentError, PatchError
from twinkle_patches.patch import Patch

if TYPE_CHECKING:
    from torch import Tensor


class NEFTunePatch(Patch):
    """Adds uniform noise from [-1, 1] times `noise_alpha / sqrt(T H)` to the embeddings `[T, H]` of training rows.

    After Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (arXiv:2310.05914). On an adapter of
    `MultiLoraTransformersModel`, locally and on a service, T is the length of the row, and the noise is a function of
    the adapter's seed, the operation, the row and the position. On a module, T is the padded length, and the noise
    comes from torch's generator, in training mode only.

    Args:
        noise_alpha: size of the noise; the paper uses 5, 10 and 15.

    Raises:
        ArgumentError: it is not a number of at least 0.
    """

    per_adapter: ClassVar[bool] = True
    changes: ClassVar[tuple[str, ...]] = ("the embeddings of training rows",)
    needed: ClassVar[str] = "to regularize instruction tuning"

    def __init__(self, noise_alpha: float = 5.0) -> None:
        self.noise_alpha = _checked(noise_alpha)

    def change_embeddings(self, embeddings: "Tensor", draw: "Callable[[int], Tensor]") -> "Tensor":
        """Return the embeddings `[T, H]` of one row with noise."""
        length, features = embeddings.shape
        scale = self.noise_alpha / math.sqrt(length * features)
        return embeddings + ((2.0 * draw(features) - 1.0) * scale).to(embeddings.dtype)

    def __call__(self, module: Any, noise_alpha: float | None = None) -> Any:
        """Add noise to the input embeddings of a model of transformers while it is in training mode."""
        import torch

        embedding = module.get_input_embeddings()
        if embedding is None:
            raise PatchError("NEFTunePatch needs a model with input embeddings; get_input_embeddings() returned None")
        alpha = self.noise_alpha if noise_alpha is None else _checked(noise_alpha)

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = original(*args, **kwargs)
            if not module.training:
                return hidden
            size = alpha / math.sqrt(hidden.shape[-2] * hidden.shape[-1])
            return hidden + torch.empty_like(hidden).uniform_(-size, size)

        self.wrap(embedding, "forward", around)
        return module


def _checked(alpha: float) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
        raise ArgumentError(f"noise_alpha must be a number of at least 0, got {alpha!r}")
    return float(alpha)

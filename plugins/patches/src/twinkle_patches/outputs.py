"""What patched models return."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class EmbeddingOutput(ModelOutput):  # type: ignore[misc]
    """Embeddings of a batch.

    Attributes:
        embeddings: `[n, H]`, each of length 1.
        last_hidden_state: `[B, T, H]`.
    """

    embeddings: Tensor | None = None
    last_hidden_state: Tensor | None = None

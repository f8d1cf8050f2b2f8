"""What a pass over some parts weighs, before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinkle_torch.head import CHUNK_TOKENS
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.pool.stream import pieces_of
from twinkle_transformers.pool.work import Part


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass weighs.

    Attributes:
        tokens: of its stream.
        width: of its longest sequence.
        beside: bytes that it needs beside activations: copies of weights, gradients, hidden states and logits of the
            head.
    """

    tokens: int
    width: int
    beside: int


class Scales:
    """Weighs passes over one model, by sizes that are read once: a configuration is slow to ask.

    Args:
        backbone: the model.
        dtype: of the low-rank products.

    Attributes:
        layers: of the model.
    """

    def __init__(self, backbone: Backbone, dtype: torch.dtype) -> None:
        config = backbone.model.config.get_text_config()
        self.layers = max(1, getattr(config, "num_hidden_layers", None) or 1)
        self._narrow, self._wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        self._logits = config.vocab_size * self._wide
        self._hidden = (getattr(config, "hidden_size", None) or 0) * self._wide
        self._splits, self._capped = backbone.splits, bool(backbone.transform.softcap)

    def weigh(self, parts: Sequence[Part], *, share: bool) -> Load:
        """Return what a pass over parts (and their twins) weighs.

        Args:
            parts: of the pass.
            share: whether prefixes that rows of a part share are computed once.
        """
        everything = [*parts, *(part.twin for part in parts if part.twin is not None)]
        tokens = sum(len(piece) for part in everything for piece in pieces_of(part, share).ids)
        beside = chunk = 0
        for part in everything:
            kept, passing = self._head_bytes(part)
            beside, chunk = beside + kept + self._adapter_bytes(part), max(chunk, passing)
        return Load(tokens, max(part.width for part in parts), beside + chunk)

    def _adapter_bytes(self, part: Part) -> int:
        """Return the bytes of an adapter's weights and gradients here, and of gradients that are kept nowhere yet."""
        work = part.work
        if work.tenant is None:
            return 0
        numbers, flat = work.tenant.plan.layout.size, work.tenant.flat
        if not work.training:
            return numbers * self._narrow
        new = (flat.grad is None and work.tenant.spare is None) + (len(work.parts) > 1 and work.grad is None)
        return numbers * (self._narrow + self._wide + new * flat.element_size())

    def _head_bytes(self, part: Part) -> tuple[int, int]:
        """Return the bytes of the head's results that stay, and of the logits that exist at one time."""
        needs = part.work.needs
        if needs.embeddings:
            return 0, 0
        if needs.logits or not self._splits:
            return 3 * part.tokens * self._logits, 0  # logits, log-probabilities, and the gradient of one of them
        copies = 4 if needs.entropies or needs.uniform_logps or self._capped else 2
        rows = min(part.tokens, needs.chunk_tokens or CHUNK_TOKENS)
        return part.tokens * self._hidden, copies * rows * self._logits

"""What a pass over some parts weighs, before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinkle.torch.head import CHUNK_TOKENS
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


def load_of(parts: Sequence[Part], backbone: Backbone, dtype: torch.dtype, *, share: bool) -> Load:
    """Return what a pass over parts (and their twins) weighs.

    Args:
        parts: of the pass.
        backbone: the model.
        dtype: of the low-rank products.
        share: whether prefixes that rows of a part share are computed once.
    """
    everything = [*parts, *(part.twin for part in parts if part.twin is not None)]
    tokens = sum(len(piece) for part in everything for piece in pieces_of(part, share).ids)
    wide = torch.promote_types(dtype, torch.float32).itemsize
    beside = sum(_adapter_bytes(part, dtype.itemsize, wide) for part in everything)
    chunk = 0
    for part in everything:
        kept, passing = _head_bytes(part, backbone, wide)
        beside, chunk = beside + kept, max(chunk, passing)
    return Load(tokens, max(part.width for part in parts), beside + chunk)


def _adapter_bytes(part: Part, narrow: int, wide: int) -> int:
    """Return the bytes for an adapter's weights, for its gradients, and for keeping those where nothing is kept yet."""
    work = part.work
    if work.tenant is None:
        return 0
    numbers, flat = work.tenant.plan.layout.size, work.tenant.flat
    if not work.training:
        return numbers * narrow
    new = (flat.grad is None and work.tenant.spare is None) + (len(work.parts) > 1 and work.grad is None)
    return numbers * (narrow + wide + new * flat.element_size())


def _head_bytes(part: Part, backbone: Backbone, wide: int) -> tuple[int, int]:
    """Return the bytes of the head's results that stay, and of the logits that exist at one time."""
    needs, config = part.work.needs, backbone.model.config.get_text_config()
    if needs.embeddings:
        return 0, 0
    logits = config.vocab_size * wide
    if needs.logits or not backbone.splits:
        return 3 * part.tokens * logits, 0  # logits, log-probabilities, and the gradient of one of them
    copies = 4 if needs.entropies or needs.uniform_logps or backbone.transform.softcap else 2
    rows = min(part.tokens, needs.chunk_tokens or CHUNK_TOKENS)
    return part.tokens * config.hidden_size * wide, copies * rows * logits

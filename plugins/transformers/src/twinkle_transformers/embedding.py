"""One vector for each row: the house's own pooling, under the name that it has here."""

from twinkle.torch.pooling import embed, last_tokens, pool

__all__ = ["embed", "last_tokens", "pool"]

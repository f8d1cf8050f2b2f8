"""What the contract kit calls those metrics with that do not count tokens."""

from typing import Any

TRAIN = {
    "varying": ("total time elapse", "speed"),
    "skip": {"ranks": "learning rate, updates and time are the same on every rank"},
}


def embedding() -> dict[str, Any]:
    """Four groups of an anchor, a positive and a negative."""
    import torch

    vectors = torch.randn((12, 5), generator=torch.Generator().manual_seed(0))
    embeddings = torch.nn.functional.normalize(vectors, dim=-1)
    labels = torch.tensor([1, 0, 0] * 4)
    return {"inputs": {"labels": labels}, "outputs": {"embeddings": embeddings}, "rows_a_group": 3}

"""What the contract kit builds and calls those losses with that need more than labels and log-probabilities."""

from typing import Any


def mse() -> dict[str, Any]:
    """A head with two values a row; one target is left out."""
    import torch

    draw = torch.Generator().manual_seed(0)
    targets = torch.randn((4, 2), generator=draw)
    targets[1, 0] = float("nan")
    return {"inputs": {"labels": targets}, "outputs": {"logits": torch.randn((4, 2), generator=draw)}}


def infonce() -> dict[str, Any]:
    """Two groups of an anchor, a positive and two negatives."""
    import torch

    vectors = torch.randn((8, 5), generator=torch.Generator().manual_seed(0))
    embeddings = torch.nn.functional.normalize(vectors, dim=-1)
    return {"inputs": {"labels": torch.tensor([1, 0, 0, 0] * 2)}, "outputs": {"embeddings": embeddings}}


def grpo() -> dict[str, Any]:
    """Every term takes part: the KL term and the entropy too."""
    return {"kwargs": {"beta": 0.1, "entropy_coef": 0.01}}


def dpo() -> dict[str, Any]:
    """Both terms take part."""
    return {"kwargs": {"sft_weight": 0.5}}

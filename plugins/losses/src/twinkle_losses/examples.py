"""What the contract kit builds and calls those losses with that need more than labels and log-probabilities."""

from typing import Any


def mse() -> dict[str, Any]:
    """A head with two values a row; one target is left out."""
    import torch

    draw = torch.Generator().manual_seed(0)
    targets = torch.randn((4, 2), generator=draw)
    targets[1, 0] = float("nan")
    return {"inputs": {"labels": targets}, "outputs": {"logits": torch.randn((4, 2), generator=draw)}}


def value() -> dict[str, Any]:
    """One value a token; some move further than they may."""
    import torch

    return {"outputs": {"logits": torch.randn((4, 6, 1), generator=torch.Generator().manual_seed(0))}}


def infonce() -> dict[str, Any]:
    """Two groups of an anchor, a positive and two negatives."""
    import torch

    vectors = torch.randn((8, 5), generator=torch.Generator().manual_seed(0))
    embeddings = torch.nn.functional.normalize(vectors, dim=-1)
    return {"inputs": {"labels": torch.tensor([1, 0, 0, 0] * 2)}, "outputs": {"embeddings": embeddings}}


_ALL_TERMS = {"beta": 0.1, "entropy_coef": 0.01, "tis_cap": 1.1}


def gkd() -> dict[str, Any]:
    """A teacher with a value for every token of the student, and not its most probable tokens alone."""
    import torch

    logits = torch.randn((4, 6, 11), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"row_inputs": {"teacher_logits": logits, "teacher_topk_logprobs": None, "teacher_topk_indices": None}}


_HELD = {"gradient": "its ratio is held constant where the formula says so, and its value is not"}


def policy() -> dict[str, Any]:
    """Every term takes part: the KL term, the entropy and the sampler's own probabilities too."""
    return {"kwargs": _ALL_TERMS}


def dapo() -> dict[str, Any]:
    """Every term takes part; there is no KL term."""
    return {"kwargs": {"entropy_coef": 0.01, "tis_cap": 1.1}}


def dr_grpo() -> dict[str, Any]:
    """Every term takes part, and the constant is not the width of the batch."""
    return {"kwargs": {**_ALL_TERMS, "max_completion_length": 9}}


def dual_clip() -> dict[str, Any]:
    """Some ratios pass each of the three bounds."""
    return {"kwargs": {**_ALL_TERMS, "dual_clip": 1.3}}


def capped() -> dict[str, Any]:
    """Every term takes part."""
    return {"kwargs": _ALL_TERMS, "skip": _HELD}


def sapo() -> dict[str, Any]:
    """The two temperatures differ."""
    return {"kwargs": {**_ALL_TERMS, "tau_neg": 1.05}}


def reinforce() -> dict[str, Any]:
    """Tokens are weighted by their ratio."""
    return {"kwargs": {**_ALL_TERMS, "importance_ratio": True}}


def dpo() -> dict[str, Any]:
    """Both terms take part."""
    return {"kwargs": {"sft_weight": 0.5}}


def _bounds() -> dict[str, Any]:
    """Bounds of each token, which some ratios pass."""
    import torch

    draw = torch.Generator().manual_seed(0)
    low, high = (torch.rand((4, 6), generator=draw) * 0.2 + least for least in (0.1, 1.05))
    return {"clip_low_threshold": low, "clip_high_threshold": high}


def ppo() -> dict[str, Any]:
    """Every token has its own bounds."""
    return {"row_inputs": _bounds()}


def cispo() -> dict[str, Any]:
    """Every token has its own bounds."""
    return {"row_inputs": _bounds(), "skip": _HELD}


def gspo() -> dict[str, Any]:
    """Every token has its own bounds, and the mask of one row is empty."""
    import torch

    mask = torch.ones(4, 6)
    mask[:, :2] = mask[2] = 0
    return {"row_inputs": {**_bounds(), "sequence_ratio_mask": mask}, "skip": _HELD}


def stable_reinforce() -> dict[str, Any]:
    """Rows hold one sampled sequence, two, two without a gap, and none."""
    import torch

    sequence = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 2, 2], [1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]])
    advantages = torch.linspace(-1, 1, 24).reshape(4, 6) * (sequence > 0)
    return {"row_inputs": {"sampled_sequence": sequence, "advantages": advantages}, "skip": _HELD}

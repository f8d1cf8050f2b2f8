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


COMPLETIONS = {
    "row_arguments": {
        "rewards": {"accuracy": [1.0, 0.0, 1.0, 0.5, 0.0, 1.0], "format": [1, 1, 0, 0, 1, 1]},
        "completion_lengths": [5, 3, 9, 1, 0, 12],
    }
}


def policy() -> dict[str, Any]:
    """Six rows of which some ratios pass the bounds; trainer and sampler disagree."""
    import torch

    draw = torch.Generator().manual_seed(1)
    old = -torch.rand((6, 5), generator=draw)
    rollout = old + 0.1 * torch.randn((6, 5), generator=draw)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0])
    return {"row_arguments": {"old_logps": old, "rollout_logps": rollout, "advantages": advantages}}


def pairs() -> dict[str, Any]:
    """Three pairs, and a reference."""
    import torch

    reference = -torch.rand((6, 5), generator=torch.Generator().manual_seed(1))
    return {"rows_a_group": 2, "row_arguments": {"ref_logps": reference}}


def teacher() -> dict[str, Any]:
    """A teacher's two most probable tokens at each position."""
    import torch

    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 4, (6, 5, 1), generator=draw) + torch.tensor([0, 4])
    logprobs = -torch.rand((6, 5, 2), generator=draw) - 1
    return {"row_arguments": {"teacher_topk_logprobs": logprobs, "teacher_topk_indices": tokens}}

"""NEFTune on a module: noise of the paper's size in training mode, none otherwise."""

import math

import pytest
import torch
from torch import nn

from twinkle.errors import ArgumentError
from twinkle.patch import apply_context
from twinkle_patches.neftune import NEFTunePatch


class Model(nn.Module):
    """A model with input embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def test_noise_is_added_in_training_mode_only() -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(40).reshape(2, 20)
    plain = model.embedding(ids).detach()
    with apply_context(model, NEFTunePatch, noise_alpha=10.0):
        noise = model.embedding(ids).detach() - plain
        bound = 10.0 / math.sqrt(20 * 16)
        assert 0.95 * bound < float(noise.abs().max()) <= bound + 1e-6
        assert float(noise.double().var()) == pytest.approx(bound**2 / 3, rel=0.15)
        model.eval()
        assert torch.equal(model.embedding(ids), plain)
    model.train()
    assert torch.equal(model.embedding(ids), plain)


@pytest.mark.parametrize("alpha", [-1.0, math.inf, math.nan, True, "5"])
def test_other_sizes_are_refused(alpha: float) -> None:
    with pytest.raises(ArgumentError, match="noise_alpha must be a number of at least 0"):
        NEFTunePatch(noise_alpha=alpha)

"""First weights of adapters: those of a layer do not depend on which other layers are adapted."""

import hashlib

import torch
from torch import Tensor


def generator_of(seed: int, layer: str) -> torch.Generator:
    """Return a generator on the CPU whose numbers are a function of a seed and a layer's path in the model."""
    digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_down(down: Tensor, draw: torch.Generator, *, gaussian: bool = False) -> None:
    """Fill A `[..., r, fan_in]` as PEFT does.

    The numbers are uniform in `+-1/sqrt(fan_in)` (Kaiming's with a = sqrt(5)), or normal with variance `1/r^2`.

    Args:
        down: A, on the CPU.
        draw: the source.
        gaussian: draw normal numbers.
    """
    if gaussian:
        down.normal_(0.0, 1.0 / down.shape[-2], generator=draw)
    else:
        down.uniform_(-(bound := down.shape[-1] ** -0.5), bound, generator=draw)

"""Random seeds of everything that draws numbers in this process."""

import os
import random

from twinkle.errors import ArgumentError


def seed_everything(seed: int, full_determinism: bool = False) -> None:
    """Seed Python, numpy and, where it is installed, torch on all devices.

    Args:
        seed: from 0 to 2**32 - 1.
        full_determinism: also make torch use deterministic algorithms only; slower, and an operation that has none
            raises.

    Raises:
        ArgumentError: the seed is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ArgumentError(f"seed is {seed!r}; give a whole number from 0 to {2**32 - 1}")
    from importlib.util import find_spec

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    if find_spec("torch") is None:
        return
    if full_determinism:
        # cuBLAS reads this when it is first used, so it must stand before any CUDA work.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.manual_seed(seed)
    if full_determinism:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False

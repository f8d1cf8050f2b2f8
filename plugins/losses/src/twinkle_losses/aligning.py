"""Where a batch trains, and per-row arguments brought to `[B, T]`: the house's, under the name that losses use."""

from twinkle.torch.trained import Trained

__all__ = ["Trained"]

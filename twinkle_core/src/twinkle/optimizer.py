"""Optimizers by name. The contract is torch's: built from parameter groups, with `step`, `zero_grad`, `state_dict`."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "optimizer")

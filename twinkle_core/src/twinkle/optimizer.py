"""Optimizers by name. The contract is torch's: built from parameter groups, with `step`, `zero_grad`, `state_dict`."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__, "optimizer")

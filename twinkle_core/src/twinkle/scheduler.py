"""Learning-rate schedulers by name. The contract is torch's: built from an optimizer, with `step` and `state_dict`."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__, "scheduler")

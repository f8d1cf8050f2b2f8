"""Learning-rate schedulers by name. The contract is torch's: built from an optimizer, with `step` and `state_dict`."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "scheduler")

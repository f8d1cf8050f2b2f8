"""Testing: the contract kit, tiny models and the fake hub, for tests of Twinkle and of its plugins."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

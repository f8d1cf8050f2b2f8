"""Testing: the contract kit, tiny models and the fake hub, for tests of Twinkle and of its plugins."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__)

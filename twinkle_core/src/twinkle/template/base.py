"""Published path of the template classes."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "template")

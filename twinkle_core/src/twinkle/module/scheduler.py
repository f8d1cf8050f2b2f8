"""Published path of the learning-rate schedulers; they live in the room `twinkle.scheduler`."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "scheduler")

"""Published path of the learning-rate schedulers; their module is `twinkle.scheduler`."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "scheduler")

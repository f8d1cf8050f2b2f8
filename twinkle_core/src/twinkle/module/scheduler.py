"""Published path of the learning-rate schedulers; they live in the room `twinkle.scheduler`."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__, "scheduler")

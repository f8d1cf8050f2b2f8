"""Published path of the preprocessors for language models; they live in the room `twinkle.preprocessor`."""

from twinkle._lazy import room

__getattr__, __dir__ = room(__name__, "preprocessor")

"""Published path of the preprocessors for language models; they live in the room `twinkle.preprocessor`."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__, "preprocessor")

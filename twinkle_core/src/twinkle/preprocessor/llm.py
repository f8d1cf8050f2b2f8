"""Published path of the preprocessors for language models; they live in the room `twinkle.preprocessor`."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "preprocessor")

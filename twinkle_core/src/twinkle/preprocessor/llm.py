"""Published path of the preprocessors for language models; their module is `twinkle.preprocessor`."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "preprocessor")

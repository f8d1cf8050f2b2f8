"""Published path of the conversions between encoded rows and Tinker's datums, which twinkle-client implements."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

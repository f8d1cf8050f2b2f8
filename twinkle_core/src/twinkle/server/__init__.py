"""The published namespace of the service; plugins such as twinkle-server and twinkle-client fill it."""

from twinkle._registry import lazy_names

__all__: list[str] = []

__getattr__, __dir__ = lazy_names(__name__)

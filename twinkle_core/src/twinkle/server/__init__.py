"""The service: `launch_server` and `ServerLauncher`, which the package twinkle-server offers."""

from twinkle._registry import lazy_names

__all__: list[str] = []

__getattr__, __dir__ = lazy_names(__name__)

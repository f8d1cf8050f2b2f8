"""The command line: `main` of the command `twinkle`, `CLI` and `Args` for scripts, helpers for plugins' commands."""

from twinkle._registry import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

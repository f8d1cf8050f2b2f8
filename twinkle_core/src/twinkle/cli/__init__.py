"""The command line: `main` of the command `twinkle`, `CLI` and `Args` for scripts, helpers for plugins' commands."""

from twinkle._registry import room

__getattr__, __dir__ = room(__name__)

"""The command `twinkle`. Nothing of a command is imported before it runs, so `twinkle --help` stays fast."""

from twinkle.cli.group import main

__all__ = ["main"]

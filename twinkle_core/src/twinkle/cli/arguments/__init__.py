"""Arguments of training scripts: `CLI.from_args()` reads them, `Args` holds them by group."""

from twinkle.cli.arguments.args import Args
from twinkle.cli.arguments.command import CLI

__all__ = ["CLI", "Args"]

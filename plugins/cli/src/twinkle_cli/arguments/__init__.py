"""Arguments of training scripts: `CLI.from_args()` reads them, `Args` has them by group."""

from twinkle_cli.arguments.args import Args
from twinkle_cli.arguments.command import CLI

__all__ = ["CLI", "Args"]

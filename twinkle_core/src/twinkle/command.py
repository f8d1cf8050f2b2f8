"""How the command `twinkle` of this installation is called, for texts that tell people what to run."""

import shutil
import sys
from pathlib import Path


def twinkle_command() -> list[str]:
    """Return the words that call this installation's `twinkle` from here: its name only where the shell finds it."""
    own = Path(sys.executable).with_name("twinkle")
    executable = shutil.which("twinkle")
    if executable is not None and Path(executable).absolute() == own:
        return ["twinkle"]
    if own.is_file():
        here = Path.cwd()
        return [str(own.relative_to(here) if own.is_relative_to(here) else own)]
    return [sys.executable, "-m", "twinkle.cli"]

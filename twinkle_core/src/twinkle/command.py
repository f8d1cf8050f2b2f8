"""The path of this installation's command `twinkle`, for messages that suggest a command."""

import shutil
import sys
from pathlib import Path


def twinkle_command() -> list[str]:
    """Return the command of this installation: `twinkle` if the shell finds it there, else a longer form."""
    own = Path(sys.executable).with_name("twinkle")
    executable = shutil.which("twinkle")
    if executable is not None and Path(executable).absolute() == own:
        return ["twinkle"]
    if own.is_file():
        here = Path.cwd()
        return [str(own.relative_to(here) if own.is_relative_to(here) else own)]
    return [sys.executable, "-m", "twinkle.cli"]

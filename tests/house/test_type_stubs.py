"""Editors and type checkers see the names that our own plugins offer; programs find them through the registry."""

import subprocess
import sys

from house import ROOT


def test_the_stubs_are_up_to_date() -> None:
    script = ROOT / "scripts" / "type_stubs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_room_imports_nothing_for_them() -> None:
    program = "import sys, twinkle.loss, twinkle.optimizer; print({'torch', 'twinkle_losses'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

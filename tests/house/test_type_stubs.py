"""Editors and type checkers see the names that our own plugins offer; programs find them through the registry."""

import subprocess
import sys

from twinkle_cli.types import stubs


def test_a_name_that_is_not_its_attribute_is_assigned_since_a_stub_would_not_export_it() -> None:
    offered = {"twinkle.loss": {"Same": "acme.losses:Same", "other": "acme.losses:Real"}}
    ((path, text, count),) = stubs(offered)
    assert (path, count) == ("loss/__init__.pyi", 2)
    assert text.endswith(
        "from acme.losses import Real as _other\nfrom acme.losses import Same as Same\nother = _other\n"
    )


def test_a_room_imports_nothing_for_them() -> None:
    program = "import sys, twinkle.loss, twinkle.optimizer; print({'torch', 'twinkle_losses'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

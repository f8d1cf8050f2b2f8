"""Folders of the checkout are not taken for packages."""

import json
import subprocess
import sys

from house import ROOT


def test_folders_of_the_checkout_are_not_taken_for_packages() -> None:
    """At the root, `registry` and `plugins` can be imported as empty namespaces; nothing uses them."""
    command = [sys.executable, "-m", "twinkle.cli", "plugins", "list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {plugin["status"] for plugin in json.loads(done.stdout)} == {"ok"}

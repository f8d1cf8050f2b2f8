"""Importing the plugin, asking for its hubs and resolving a local path load no client library."""

import re
import subprocess
import sys

HEAVY = ("huggingface_hub", "modelscope", "modelscope_hub", "requests", "httpx", "httpx2", "datasets", "torch", "numpy")


def test_the_clients_are_imported_when_they_are_used() -> None:
    script = f"""
import sys
from twinkle.hub import FileHub, HFHub, HubOperation, MSHub, open_hub
import twinkle_hub, twinkle_hub.folder, twinkle_hub.hugging_face, twinkle_hub.model_scope, twinkle_hub.rows
assert HFHub is twinkle_hub.hugging_face.HFHub and MSHub is twinkle_hub.model_scope.MSHub
assert isinstance(open_hub("hf://a/b"), HFHub) and isinstance(open_hub("MS://a/b"), MSHub)
assert isinstance(open_hub("file:///"), FileHub)
assert HubOperation.download_model("/tmp") == "/tmp"
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_without_its_client_a_hub_says_what_to_install() -> None:
    script = """
from importlib import metadata
found = metadata.distribution
def distribution(name):
    if name == "modelscope-hub":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.distribution = distribution
from twinkle.errors import RequirementMissing
from twinkle.hub import local_model
for name in ("ms://a/b", "a/b"):
    try:
        local_model(name)
    except RequirementMissing as error:
        print(str(error).replace("\\n", " "))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(re.search(r"ms.*modelscope-hub>=0.5", line) for line in lines), lines

"""Importing the plugin, asking for its hubs and resolving a local path load no client library."""

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


def test_without_a_client_the_hub_says_what_to_install() -> None:
    script = """
import sys
sys.modules["modelscope_hub"] = None
from twinkle.errors import RequirementMissing
from twinkle.hub import local_model
for id in ("ms://a/b", "a/b"):
    try:
        local_model(id)
    except RequirementMissing as error:
        assert "run: pip install 'twinkle-hub[modelscope]'" in str(error), error
        print("told")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "told\ntold\n", done.stderr

"""Every kind of component has a room, a hook spec and a contract, and the sets agree."""

import importlib
import inspect
import json
import subprocess
import sys

import pytest
from house import ROOT

import twinkle
from twinkle import hookspecs
from twinkle.kinds import KINDS

each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_a_kind_has_a_room_that_lists_its_components(kind: str) -> None:
    room = importlib.import_module(f"twinkle.{kind}")
    assert room.__doc__
    assert {*twinkle.registry().names(kind)} - {"local", "builtin"} <= {*dir(room)}


@each_kind
def test_a_kind_has_a_hook_that_says_what_it_is_for(kind: str) -> None:
    hook = getattr(hookspecs, f"twinkle_{kind}")
    assert f"kind `{kind}`" in inspect.getdoc(hook)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.contract])
def test_a_contract_lies_in_its_room_and_is_explained(kind: str) -> None:
    module, _, name = KINDS[kind].contract.partition(":")
    assert module == f"twinkle.{kind}"
    room = importlib.import_module(module)
    assert inspect.getdoc(getattr(room, name))
    assert name in dir(room)


def test_every_component_hook_belongs_to_a_kind() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("twinkle_")}
    components = {name for name in hooks if "ComponentSpec" in str(inspect.signature(getattr(hookspecs, name)))}
    assert components == {f"twinkle_{kind}" for kind in KINDS}


def test_folders_of_the_checkout_are_not_taken_for_packages() -> None:
    """At the root, `registry` and `plugins` can be imported as empty namespaces; nothing falls for it."""
    command = [sys.executable, "-m", "twinkle.cli", "plugins", "list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {plugin["status"] for plugin in json.loads(done.stdout)} == {"ok"}

"""A second backend: the engine of the scaffold, a Llama model written by hand in torch, as a file of its own."""

from pathlib import Path

from twinkle_scaffolds.baking import bake


def handwritten_engine(parent: Path) -> str:
    """Make a new plugin of kind `engine`; return the reference of its class, as `--backend` takes it.

    The plugin is not installed: nothing but the file is known.
    """
    project = bake("engine", "acme-engine", parent, author="Ada Lovelace")
    return f"{project / 'src' / 'acme_engine' / 'engine.py'}:AcmeEngine"

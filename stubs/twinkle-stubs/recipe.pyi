# Written by `twinkle plugins types`; do not edit.
"""Recipes: the contract `Recipe`, and every installed recipe by name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from twinkle._registry import lazy_names

if TYPE_CHECKING:
    from twinkle.run import Run

__all__ = ["Recipe"]


@runtime_checkable
class Recipe(Protocol):
    """A whole run as one function that reads top to bottom.

    The manifest names its configuration (`config = "package.module:Config"`, a pydantic model), from which
    `twinkle run NAME` makes command-line options; the recipe gets the validated configuration and a `Run`.
    If the configuration has the key `trackers`, these are attached to the run. If it has `run_folder`, the run
    continues in that existing folder instead of a new one.
    """

    def __call__(self, config: Any, run: "Run") -> Mapping[str, Any]:
        """Run to the end and return a summary (final metrics, path of the result)."""



from twinkle_recipes.dpo import dpo as dpo
from twinkle_recipes.embedding import embedding as embedding
from twinkle_recipes.gkd import gkd as gkd
from twinkle_recipes.grpo import grpo as grpo
from twinkle_recipes.grpo import rloo as rloo
from twinkle_recipes.sft import sft as sft

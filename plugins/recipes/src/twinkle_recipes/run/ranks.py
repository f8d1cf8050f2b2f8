"""The ranks of a run under torchrun: who they are, and that they stop together."""

from typing import TYPE_CHECKING

from twinkle.errors import ConfigError
from twinkle.platform import Platform
from twinkle.runtime.current import current_runtime
from twinkle_recipes.run.interrupt import StopRequest

if TYPE_CHECKING:
    from twinkle.mesh.ranks import Ranks


def ranks_of_this_run() -> "Ranks":
    """Return the ranks of the mesh that `twinkle.initialize` was given; collective."""
    from twinkle.mesh.ranks import Ranks

    return Ranks.of(current_runtime().mesh)


def check_alone(recipe: str) -> None:
    """Refuse to run on several ranks.

    Raises:
        ConfigError: there are several.
    """
    if Platform.get_world_size() > 1:
        raise ConfigError(
            f"the recipe {recipe} runs in one process, and {Platform.get_world_size()} were started; leave --nproc "
            "and torchrun out"
        )


def agree_to_stop(stop: StopRequest, ranks: "Ranks") -> bool:
    """Return whether any rank was asked to stop, so that all stop at the same step; collective."""
    return bool(ranks.agree("asking whether to stop", stop.requested).any())


def check_stop(stop: StopRequest, ranks: "Ranks") -> None:
    """Raise KeyboardInterrupt on every rank if one was asked to stop; collective."""
    if agree_to_stop(stop, ranks):
        raise KeyboardInterrupt

"""The start of a run: checks, the display, the data, and the step to resume from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twinkle.platform import seed_everything
from twinkle.run import Run
from twinkle_recipes.config import RunConfig
from twinkle_recipes.data import describe_data, loaders
from twinkle_recipes.display import Columns, Display, Silent, display
from twinkle_recipes.run.checkpoints import resume, show_how_to_resume, whole_run, write_config
from twinkle_recipes.run.keeper import Curves, Keeper
from twinkle_recipes.run.plan import base_models, check_early, make_plan, measured_paths, show_paths, write_plan
from twinkle_recipes.run.stopping import StopRequest, check_alone, ranks_of_this_run

if TYPE_CHECKING:
    from twinkle.mesh.ranks import Ranks

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class Opening(Generic[Config]):
    """A run before its first step, new or resumed.

    Attributes:
        config: The configuration of this part of the run.
        whole: The configuration of the whole run, which may have more steps.
        run: The run folder, trackers and hooks.
        plan: Which plugin provides each component.
        ranks: The processes that train the model.
        show: The display; only the first rank's shows anything.
        stop: Whether the user asked the run to end.
    """

    config: Config
    whole: Config
    run: Run
    plan: dict[str, Any]
    ranks: "Ranks"
    show: Display
    stop: StopRequest

    def data(self, encode: Callable[[Any, Config], None] | None = None) -> tuple[Any, Any]:
        """Return the loaders of training and held-out rows (see `loaders`), and show how many batches there are."""
        training, held_out = loaders(self.config, encode)
        self.show.say(f"data: {describe_data(training, held_out)}")
        self.stop.check()
        return training, held_out

    def keeper(
        self, model: Any, training: Any, steps: int, curves: Curves, accumulation: int = 1, **criterion: Any
    ) -> Keeper:
        """Restore model and data to the step that the run continues from, and return the keeper of its steps.

        Args:
            model: The model, built as configured.
            training: The loader of the training rows.
            steps: Number of the last step of this part.
            curves: See `Keeper`.
            accumulation: Backward passes of one step.
            **criterion: `decides` and `highest`, see `Keeper`.
        """
        if not self.ranks.is_first:
            seed_everything(self.config.seed + self.ranks.index)  # each rank has its own dropout
        resumed = resume(self.config, model, self.run, accumulation)
        if resumed.done:
            training.resume_from_checkpoint(resumed.consumed)
        self.stop.check()
        return Keeper(
            self.config, self.run, self.show, self.stop, resumed, steps, curves, writes=self.ranks.is_first, **criterion
        )

    def write(self, *components: Any) -> None:
        """Write the configuration and the plan of the run, and show which fast paths are on.

        Args:
            *components: The models and samplers of the run.
        """
        self.stop.check()
        if not self.ranks.is_first:
            return
        paths = measured_paths(*components)
        write_plan({**self.plan, "paths": paths}, self.run.folder)
        write_config(self.whole, self.run.folder)
        self.show.say(f"run: {self.run.folder} ({len(self.plan['parts'])} parts, see plugins.json)")
        show_paths(self.show, paths)


@contextmanager
def opened(config: Config, run: Run, columns: Columns, charted: str = "loss") -> Iterator[Opening[Config]]:
    """Check a configuration, resolve its components and seed everything.

    Within the block, Ctrl-C requests a stop; after it, the command that resumes the run is shown.

    Args:
        config: The configuration of the run.
        run: The run folder, trackers and hooks.
        columns: The numbers of a step that are shown.
        charted: The number that a terminal shows as a chart.

    Raises:
        ConfigError: Several processes run a recipe that needs one, or a resumed run differs from how it began.
        TwinkleError: See `check_early` and `make_plan`.
    """
    whole_config = whole_run(config)
    check_early(config)
    if not config.takes_ranks:
        check_alone(config.recipe)
    ranks = ranks_of_this_run()
    show = display(config.log_every, columns=columns, charted=charted) if ranks.is_first else Silent()

    def acknowledge() -> None:
        show.note("stopping after this step; press Ctrl-C again to stop immediately")

    with show_how_to_resume(show, run.folder, config.recipe), StopRequest(acknowledge, ranks) as stop:
        plan = make_plan(config) | {"models": base_models(config)}
        seed_everything(config.seed)
        yield Opening(config, whole_config, run, plan, ranks, show, stop)

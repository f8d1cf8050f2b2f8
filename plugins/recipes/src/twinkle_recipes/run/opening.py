"""What comes before the first step of a run in one process: checks, the display, the data, and where it goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from twinkle.run import Run
from twinkle.runtime.seeding import seed_everything
from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.rows.loading import loaders
from twinkle_recipes.run.interrupt import StopRequest
from twinkle_recipes.run.keeper import Curves, Keeper
from twinkle_recipes.run.plan import base_models, check_early, make_plan, measured_paths, say_paths, write_plan
from twinkle_recipes.run.ranks import check_alone
from twinkle_recipes.run.results import told_of
from twinkle_recipes.run.resuming import resume, say_how_to_resume, write_config
from twinkle_recipes.run.unchanged import whole_run
from twinkle_recipes.show.progress import Columns, Display, display

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class Opening(Generic[Config]):
    """A run that is about to begin, or to go on.

    Attributes:
        config: of this part of the run.
        whole: of the whole run, which may have more steps.
        run: where it is written.
        plan: which plugin answers to each name.
        show: what the user sees.
        stop: whether the user wants it to end.
    """

    config: Config
    whole: Config
    run: Run
    plan: dict[str, Any]
    show: Display
    stop: StopRequest

    def data(self, encode: Callable[[Any, Config], None] | None = None) -> tuple[Any, Any]:
        """Return the loaders of training and held-out rows, as `loaders` does, and tell how much there is."""
        training, held_out = loaders(self.config, encode)
        self.show.say(f"data: {told_of(len(training), held_out)}")
        self.stop.check()
        return training, held_out

    def keeper(self, model: Any, training: Any, steps: int, curves: Curves, **decides: Any) -> Keeper:
        """Bring model and data to where the run goes on, and return what keeps its steps.

        Args:
            model: built as configured.
            training: loader of the training rows.
            steps: number of the last step of this part.
            curves: as of `Keeper`.
            **decides: which checkpoint is the best, as of `Keeper`.
        """
        resumed = resume(self.config, model, self.run)
        if resumed.done:
            training.resume_from_checkpoint(resumed.consumed)
        self.stop.check()
        return Keeper(self.config, self.run, self.show, self.stop, resumed, steps, curves, **decides)

    def write(self, *components: Any) -> None:
        """Write down how the run is configured, which parts it has, and which of their fast paths are on.

        Args:
            *components: models and samplers that compute the run.
        """
        self.stop.check()
        paths = measured_paths(*components)
        write_plan({**self.plan, "paths": paths}, self.run.folder)
        write_config(self.whole, self.run.folder)
        self.show.say(f"run: {self.run.folder} ({len(self.plan['parts'])} parts, see plugins.json)")
        say_paths(self.show, paths)


@contextmanager
def opened(config: Config, run: Run, columns: Columns, charted: str = "loss") -> Iterator[Opening[Config]]:
    """Check a configuration and seed everything; while the block lasts, hear Ctrl-C and say how to go on after it.

    Args:
        config: of the run.
        run: where it is written.
        columns: the numbers of a step that are shown.
        charted: the one of them that a terminal draws.

    Raises:
        ConfigError: there are several processes, or a resumed run is not as it began.
        TwinkleError: what `check_early` and `make_plan` find.
    """
    whole = whole_run(config)
    check_early(config)
    check_alone(config.recipe)
    show = display(config.log_every, columns=columns, charted=charted)
    with (
        say_how_to_resume(show, run.folder, config.recipe),
        StopRequest(lambda: show.note("stopping as soon as this step is done; Ctrl-C again stops at once")) as stop,
    ):
        plan = make_plan(config) | {"models": base_models(config)}
        seed_everything(config.seed)
        yield Opening(config, whole, run, plan, show, stop)

"""The tracker that records a run with Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from twinkle_trackers.service import ServiceTracker, check_choice, check_text, kept_id, new_id, numbers

if TYPE_CHECKING:
    from twinkle.run import Run


class WandbTracker(ServiceTracker):
    """Records configuration, numbers and end of a run with `wandb`, whose files stay below `run.folder/wandb`.

    A run that continues in its folder continues under the same id, kept in `wandb.id`; steps that the service has
    already stay as they are. An error of wandb is logged once and leaves the run alone. Who you are, and whether the
    service is asked at all, is wandb's business: `wandb login`, `WANDB_API_KEY`, `WANDB_MODE`.

    Args:
        project: the project there.
        name: what the run is called there; by default the name of its folder.
        entity: the user or team; by default yours.
        group: runs with the same text are shown together.
        tags: labels of the run.
        mode: `online`, `offline` (files only, for `wandb sync`) or `disabled`; by default what wandb is set to.

    Raises:
        ArgumentError: an argument does not fit.
    """

    def __init__(
        self,
        project: str = "twinkle",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        super().__init__()
        check_text("WandbTracker", "project", project)
        check_choice("WandbTracker", "mode", mode, ("online", "offline", "disabled"))
        self.project, self.name, self.entity, self.group, self.mode = project, name, entity, group, mode
        self.tags = [tags] if isinstance(tags, str) else list(tags)

    def begin(self, run: "Run") -> Any:
        """Start or resume the run at the service."""
        import wandb

        identity, continued = kept_id(run, "wandb", new_id)
        return wandb.init(
            project=self.project,
            name=self.name or run.folder.name,
            entity=self.entity,
            group=self.group,
            tags=self.tags or None,
            config=run.config,
            id=identity,
            resume="allow" if continued else None,
            dir=str(run.folder),
            mode=self.mode,
            reinit="create_new",  # another run of this process may be open
            settings=wandb.Settings(console="off"),  # the progress bar is no log
        )

    def record(self, session: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`."""
        session.log(numbers(metrics), step=step)

    def end(self, session: Any, error: BaseException | None) -> None:
        """Send what is left; a run that failed has exit code 1 there."""
        session.finish(exit_code=0 if error is None else 1)

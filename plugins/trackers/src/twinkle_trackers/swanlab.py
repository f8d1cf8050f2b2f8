"""The tracker that records a run with SwanLab."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from twinkle_trackers.service import ServiceTracker, check_choice, check_text, finite, kept_id, new_id

if TYPE_CHECKING:
    from twinkle.run import Run


class SwanLabTracker(ServiceTracker):
    """Records configuration, numbers and end of a run with `swanlab`, whose files stay below `run.folder/swanlog`.

    A run that continues in its folder continues under the same id, kept in `swanlab.id`, where the mode is `online`; in
    the others each process writes a folder of its own. NaN and infinite numbers are left out. An error of swanlab is
    logged once and leaves the run alone. Who you are is swanlab's business: `swanlab login`, `SWANLAB_API_KEY`.

    Args:
        project: the project there.
        name: what the run is called there; by default the name of its folder.
        workspace: the user or organization; by default yours.
        group: runs with the same text are shown together.
        tags: labels of the run.
        mode: `online`, `local` (for `swanlab watch`), `offline` (files only, for `swanlab sync`) or `disabled`; by
            default what swanlab is set to.

    Raises:
        ArgumentError: an argument does not fit.
    """

    def __init__(
        self,
        project: str = "twinkle",
        name: str | None = None,
        workspace: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "local", "offline", "disabled"] | None = None,
    ) -> None:
        super().__init__()
        check_text("SwanLabTracker", "project", project)
        check_choice("SwanLabTracker", "mode", mode, ("online", "local", "offline", "disabled"))
        self.project, self.name, self.workspace, self.group, self.mode = project, name, workspace, group, mode
        self.tags = [tags] if isinstance(tags, str) else list(tags)

    def begin(self, run: "Run") -> Any:
        """Start or resume the run at the service."""
        import swanlab

        identity, continued = kept_id(run, "swanlab", new_id)
        return swanlab.init(
            project=self.project,
            name=self.name or run.folder.name,
            workspace=self.workspace,
            group=self.group,
            tags=self.tags or None,
            config=run.config,
            id=identity,
            resume="allow" if continued else None,
            log_dir=str(run.folder / "swanlog"),
            mode=self.mode,
        )

    def record(self, session: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`."""
        session.log(finite(metrics), step=step)

    def end(self, session: Any, error: BaseException | None) -> None:
        """Send what is left; a run that failed has crashed there, one that was stopped was aborted."""
        if error is None:
            session.finish("success")
        else:
            state = "crashed" if isinstance(error, Exception) else "aborted"
            session.finish(state, error=f"{type(error).__name__}: {error}")

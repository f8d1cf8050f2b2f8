"""The tracker that records a run with SwanLab."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from twinkle.tracker import Tracker
from twinkle_registry import hookimpl
from twinkle_trackers.service import Health, careful, check_choice, check_text, finite, kept_id, new_id

if TYPE_CHECKING:
    from twinkle.run import Run


class SwanLabTracker(Tracker):
    """Records configuration, numbers and end of a run with `swanlab`, whose files stay below `run.folder/swanlog`.

    A run that continues in its folder goes on under the same id, kept in `swanlab.id`, where the mode is `online`; in
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
        check_text("SwanLabTracker", "project", project)
        check_choice("SwanLabTracker", "mode", mode, ("online", "local", "offline", "disabled"))
        self.project, self.name, self.workspace, self.group, self.mode = project, name, workspace, group, mode
        self.tags = [tags] if isinstance(tags, str) else list(tags)
        self.health = Health()
        self._run: Any = None
        self._error: BaseException | None = None

    @hookimpl
    def twinkle_run_start(self, run: "Run") -> None:
        """Begin the run there, or go on with it."""
        self.health.lost, self._error = False, None
        self._open(run)

    @hookimpl
    @careful
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`."""
        if self._run is None:
            self._open(run)
        if self._run is not None:
            self._run.log(finite(metrics), step=step)

    @hookimpl
    def twinkle_run_error(self, run: "Run", error: BaseException) -> None:
        """Remember why the run ends."""
        self._error = error

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Send what is left; a run that failed has crashed there, one that was stopped was aborted."""
        opened, self._run = self._run, None
        if opened is not None:
            self.health.lost = False  # also a run that could not log all is to be ended
            self._finish(opened)
        self._error = None

    @careful
    def _open(self, run: "Run") -> None:
        import swanlab

        identity, continued = kept_id(run, "swanlab", new_id)
        self._run = swanlab.init(
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

    @careful
    def _finish(self, opened: Any) -> None:
        if self._error is None:
            opened.finish("success")
        else:
            state = "crashed" if isinstance(self._error, Exception) else "aborted"
            opened.finish(state, error=f"{type(self._error).__name__}: {self._error}")

"""The tracker that records a run with Trackio."""

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_trackers.service import ServiceTracker, check_text, numbers

if TYPE_CHECKING:
    from twinkle.run import Run

PLACE = "TRACKIO_DIR"


class TrackioTracker(ServiceTracker):
    """Records configuration and numbers of a run with `trackio`, in its database below `run.folder/trackio`.

    `TRACKIO_DIR=<that folder> trackio show` shows it. A run that continues in its folder continues under the same name;
    steps that are there already stay as they are. Where `TRACKIO_DIR` is set, the database is there instead. An error
    of trackio is logged once and leaves the run alone. Trackio has no word for a run that failed.

    Args:
        project: the project there.
        name: what the run is called there, unlike all others; by default the name of its folder.
        group: runs with the same text are shown together.
        space_id: a Hugging Face Space, `user/name`, to record to instead of the folder; None: none.

    Raises:
        ArgumentError: an argument does not fit.
    """

    def __init__(
        self, project: str = "twinkle", name: str | None = None, group: str | None = None, space_id: str | None = None
    ) -> None:
        super().__init__()
        check_text("TrackioTracker", "project", project)
        self.project, self.name, self.group, self.space_id = project, name, group, space_id
        self._first = 0

    def begin(self, run: "Run") -> Any:
        """Start or resume the run at the service."""
        with _quiet():
            session = _init(
                run.folder / "trackio",
                project=self.project,
                name=self.name or run.folder.name,
                group=self.group,
                space_id=self.space_id,
                config=run.config,
                resume="allow",
                embed=False,
            )
        self._first = getattr(session, "_next_step", 0)  # one after the last step that is there
        return session

    def record(self, session: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`, unless they are there."""
        if step >= self._first:
            session.log(numbers(metrics), step=step)

    def end(self, session: Any, error: BaseException | None) -> None:
        """Write out what waits."""
        with _quiet():
            session.finish()
        _forget(session)


def _init(folder: Path, **arguments: Any) -> Any:
    """Begin a run with its database in `folder`, unless a place is set.

    Trackio reads the place once, when it is imported, and each of its modules keeps it; so a further run of the process
    sets it in all of them.
    """
    if not os.environ.get(PLACE):
        folder.mkdir(exist_ok=True)
        if "trackio" not in sys.modules:
            os.environ[PLACE] = str(folder)
            try:
                import trackio
            finally:
                del os.environ[PLACE]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trackio" and PLACE in vars(module):
                setattr(module, PLACE, folder)
    import trackio

    return trackio.init(**arguments)


def _forget(run: Any) -> None:
    """Let trackio not end the run once more, and say so, at the end of the process."""
    import trackio

    variables = getattr(trackio, "context_vars", None)
    if variables is not None and variables.current_run.get() is run:
        variables.current_run.set(None)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Keep from the terminal what trackio prints about itself."""
    return contextlib.redirect_stdout(io.StringIO())

"""A run: its folder with a lock against a second writer, its metrics, and the lifecycle hooks that it calls."""

import contextlib
import datetime
import errno
import json
import operator
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from twinkle.errors import ArgumentError, ConfigError, OutputError
from twinkle.logging import get_logger

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Run:
    """A run in a new folder `<root>/<name>-<time>/`, used as a context manager.

    Entering calls the hooks `twinkle_configure` and `twinkle_run_start`; leaving calls `twinkle_run_error` (if there is
    an exception) and `twinkle_run_end`. During the run its trackers are attached to the registry as plugins.

    With several processes (after `twinkle.initialize`) the first one creates the folder, has the trackers and calls the
    hooks; the others use the same folder and call only `twinkle_configure`.

    During the run the file `.lock` in the folder is locked, so that no second process writes there. The system releases
    the lock when the process ends, also if it is killed.

    Args:
        name: name of the run: letters, digits, `-`, `_` and `.`.
        config: the whole configuration, as plain values.
        trackers: components of kind `tracker`, in any form of component argument, or as a mapping: `type` names the
            tracker, the other keys are its arguments.
        root: parent of run folders; by default `runs` in the current folder.
        folder: an existing run folder to continue in, instead of a new one.

    Attributes:
        folder: the run's folder.
        config: the configuration.
        step: number of the last step logged.

    Raises:
        ConfigError: the name is not valid for a folder.
        OutputError: the folder cannot be created or written, or (on entering) another process is writing to it.
    """

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        trackers: Sequence[Any] = (),
        root: str | Path = "runs",
        folder: str | Path | None = None,
    ) -> None:
        from twinkle.platform import Platform

        self.name = name
        self.config = dict(config or {})
        self.step = 0
        self._attached = contextlib.ExitStack()
        self._is_first = Platform.is_master()
        self._listener = _failure_listener()
        self._trackers = [build_tracker(tracker) for tracker in trackers if self._is_first]
        self._is_fresh = folder is None
        self.folder = _existing(Path(folder)) if folder is not None else _agreed(Path(root), name)

    def __enter__(self) -> "Run":
        from twinkle._registry import registry

        with contextlib.ExitStack() as attached:  # if one cannot be attached, detach the others
            attached.push(self._forget_empty)

            def lock() -> None:
                attached.enter_context(only_writer(self.folder))

            _on_first(f"locking {self.folder}", lock)
            for index, tracker in enumerate(self._trackers):
                name = f"run:{self.folder.name}:{index}"
                registry().attach(tracker, name)
                attached.callback(registry().detach, name)
            if self._listener is not None:
                registry().attach(self._listener, f"run:{self.folder.name}:notifier")
                attached.callback(registry().detach, f"run:{self.folder.name}:notifier")
            self._attached = attached.pop_all()
        registry().hook("twinkle_configure")(config=self.config)
        self._fire("twinkle_run_start", run=self)
        return self

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Record the numbers of a step with every tracker and lifecycle plugin.

        Args:
            metrics: numbers by name (a tensor or array with one element counts as a number); texts are recorded by the
                trackers that support them.
            step: number of the optimizer step, from 1; 0 for measurements before the first. A step may be logged
                several times, but not after a later one.

        Raises:
            ArgumentError: the metrics or the step are not of this form; nothing is recorded.
        """
        checked = checked_metrics(metrics)
        self.step = checked_step(step, self.step)
        self._fire("twinkle_step_end", run=self, step=self.step, metrics=checked)

    def checkpoint_saved(self, path: str | Path, step: int) -> None:
        """Notify trackers and plugins that a checkpoint was written to `path`."""
        self._fire("twinkle_checkpoint_saved", run=self, path=Path(path), step=step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._fire("twinkle_run_error", run=self, error=error)
                if self._listener is not None and not self._is_first:  # notifiers report the errors of every rank
                    self._listener.twinkle_run_error(self, error)
            self._fire("twinkle_run_end", run=self)
        finally:
            self._attached.__exit__(kind, error, trace)

    def _fire(self, hook: str, **arguments: Any) -> None:
        from twinkle._registry import registry

        if self._is_first:
            registry().hook(hook)(**arguments)

    def _forget_empty(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the new folder of a run that failed before it wrote anything."""
        if error is not None and self._is_fresh and self._is_first:
            with contextlib.suppress(OSError):  # it is not empty
                self.folder.rmdir()


def build_tracker(given: Any) -> Any:
    """Build a tracker from any form of component argument, or from a mapping with a key `type`."""
    from twinkle._registry import registry

    if not isinstance(given, Mapping):
        return registry().build(given, "tracker")
    arguments = dict(given)
    name = arguments.pop("type", None)
    if not isinstance(name, str) or not name:
        raise ArgumentError(
            f"a tracker as a mapping needs the key 'type', such as 'JsonlTracker'; it has {sorted(map(str, given))}"
        )
    return registry().build(name, "tracker", **arguments)


def _failure_listener() -> Any:
    """Return the listener that sends a failure of the run to the notifiers; None without notifiers.

    Raises:
        SettingsError: TWINKLE_NOTIFIER cannot be read.
        RequirementMissing: it is set, and the package that reads it is not installed.
    """
    from twinkle._registry import registry

    if not os.environ.get("TWINKLE_NOTIFIER") and "run_listener" not in registry().exports("twinkle.notifier"):
        return None
    return registry().attribute("twinkle.notifier", "run_listener")()


def _agreed(root: Path, name: str) -> Path:
    """Return a new folder, the same in every process."""
    from twinkle.platform import Platform

    if Platform.get_world_size() == 1:
        return _fresh(root, name)
    from twinkle.mesh.ranks import Ranks
    from twinkle.runtime.current import current_runtime

    return Ranks.of(current_runtime().mesh).on_first(f"making a run folder in {root}", lambda: _fresh(root, name))


def _on_first(what: str, function: Callable[[], None]) -> None:
    """Call a function in the first process; if it fails there, all processes fail."""
    from twinkle.platform import Platform
    from twinkle.runtime.current import current_runtime

    mesh = current_runtime().mesh
    if Platform.get_world_size() > 1 and mesh is not None:
        from twinkle.mesh.ranks import Ranks

        Ranks.of(mesh).on_first(what, function)
    elif Platform.is_master():
        function()


def _fresh(root: Path, name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"run name {name!r}: use letters, digits, '-', '_' and '.' only")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = root
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            folder = root / (f"{name}-{stamp}" if attempt == 1 else f"{name}-{stamp}-{attempt}")
            if not folder.exists():
                with contextlib.suppress(FileExistsError):  # another process was faster
                    folder.mkdir()
                    return folder
    except OSError as error:
        raise OutputError(
            f"cannot make the run folder {folder}: {error.strerror or error}; choose another with --runs DIR"
        ) from error
    raise OutputError(f"cannot make a run folder below {root}: 999 runs of this second exist")


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise OutputError(f"run folder {folder} does not exist; leave it out to start a fresh run")
    return folder


def parts_of(folder: Path) -> list[dict[str, str]]:
    """Return the components in `plugins.json` of a run folder: `kind`, `asked` and `ref` of each.

    The file is a record for people. If it is missing or damaged, the result is empty and the run continues.
    """
    try:
        parts = json.loads((folder / "plugins.json").read_text(encoding="utf-8"))["parts"]
        return [part for part in parts if {"kind", "asked", "ref"} <= set(part)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def fingerprints_of(folder: Path) -> dict[str, str]:
    """Return the fingerprints of the models that a run started with, by id, from `plugins.json` of its folder."""
    try:
        models = json.loads((folder / "plugins.json").read_text(encoding="utf-8"))["models"]
        return {str(model["id"]): str(model["fingerprint"]) for model in models}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def recipe_of(folder: Path) -> str | None:
    """Return the recipe of the run in a folder, if it is recorded."""
    return next((part["asked"] for part in parts_of(folder) if part["kind"] == "recipe"), None)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, the file `.lock` in it, for the length of the block.

    Raises:
        OutputError: another process holds it, or the file cannot be made.
    """
    path = folder / NAME
    try:
        held = _acquired(path)
    except BlockingIOError as error:
        raise OutputError(
            f"{_holder(path)} is still writing the run in {folder}; wait until it has ended, or end it"
        ) from error
    except OSError as error:
        raise OutputError(f"cannot write in the run folder {folder}: {error.strerror or error}") from error
    try:
        with contextlib.suppress(OSError):  # the content is for people only; later writes report a full disk
            os.ftruncate(held, 0)
            os.write(held, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(held)


def _acquired(path: Path) -> int:
    """Return the descriptor of the file, locked."""
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(held, path)
            if _is_at(path, held):
                return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)  # the previous owner has removed the file in the meantime


def _lock(held: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        get_logger(__name__).warning(
            "the file system of %s has no locks, so nothing hinders a second process from writing there", path.parent
        )


def _is_at(path: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.fstat(held), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip() or "another process"
    return "another process"


def checked_metrics(metrics: Any) -> Mapping[str, Any]:
    """Return the metrics, if they are names with a number or a text each.

    Raises:
        ArgumentError: they are not; the text names the metric.
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"run.log: metrics is of type {type(metrics).__name__}; give a mapping, such as {{'loss': 2.5}}"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ArgumentError(f"run.log: a metric is called {name!r}; its name is a text, such as 'loss'")
        if not _is_number_or_text(value):
            raise ArgumentError(
                f"run.log: metric {name!r} is of type {type(value).__name__} and not one number; "
                "give a number or a text"
            )
    return metrics


def checked_step(step: Any, last: int) -> int:
    """Return the number of a step as an int, if it is one that may follow step `last`.

    Raises:
        ArgumentError: it may not.
    """
    try:
        number = operator.index(step)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises either of the latter
        number = -1
    if number < 0 or isinstance(step, bool):
        what = repr(step) if isinstance(step, int | float | str) else f"of type {type(step).__name__}"
        raise ArgumentError(f"run.log: step is {what}; give a whole number from 0, such as step=1")
    if number < last:
        raise ArgumentError(f"run.log: step {number} comes after step {last}; log the steps in their order")
    return number


def _is_number_or_text(value: Any) -> bool:
    if isinstance(value, str | int | float):
        return True
    if isinstance(value, bytes | bytearray):  # `float` would read them as a text
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises one of the latter
        return False
    return True

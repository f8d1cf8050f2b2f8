"""Progress of downloads (bars on a terminal, log lines in a file), and marks of interrupted downloads."""

import functools
import hashlib
import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_YES = {"1", "ON", "YES", "TRUE"}
_SLOW = 2.0  # seconds; a faster download is not logged


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) forbids the network; this applies to every hub."""
    return any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def has_bars() -> bool:
    """Return whether progress bars may be drawn: in the main thread, and on a terminal."""
    return sys.stderr.isatty() and threading.current_thread() is threading.main_thread()


@contextmanager
def progress(name: str, *, new: bool) -> Iterator[None]:
    """Show the progress of a download: bars on a terminal; else, if it is `new`, log lines before and after it."""
    from twinkle.logging import get_logger

    in_progress = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(quiet_modelscope())
        stack.enter_context(_plain_modelscope())
        stack.enter_context(without_bars(*(["huggingface_hub.utils"] if "huggingface_hub" in sys.modules else [])))
        if new and not has_bars():
            get_logger().info("downloading %s", name)
        yield
    if new and not has_bars() and (seconds := time.monotonic() - in_progress) > _SLOW:
        get_logger().info("downloaded %s in %.0f s", name, seconds)


@contextmanager
def quiet_modelscope() -> Iterator[None]:
    """Suppress ModelScope's log and printed reports; errors are raised anyway."""
    logger = logging.getLogger("modelscope_hub")
    level = logger.level
    if "MODELSCOPE_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.CRITICAL)
    uploads = sys.modules.get("modelscope_hub._upload")
    try:
        if uploads is not None:
            uploads.__dict__["print"] = lambda *_, **__: None
        yield
    finally:
        logger.setLevel(level)
        if uploads is not None:
            uploads.__dict__.pop("print", None)


@contextmanager
def without_bars(*modules: str) -> Iterator[None]:
    """Disable the progress bars of client libraries, unless bars may be drawn.

    Args:
        *modules: modules with the functions `disable_progress_bars` and `enable_progress_bars`.
    """
    with ExitStack() as stack:
        for module in modules if not has_bars() else ():
            _disable_bars(module, stack)
        yield


def _disable_bars(module: str, stack: ExitStack) -> None:
    client = importlib.import_module(module)
    if client.are_progress_bars_disabled():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns if an environment variable overrides the call
        client.disable_progress_bars()
    stack.callback(client.enable_progress_bars)


@contextmanager
def _plain_modelscope() -> Iterator[None]:
    """Disable ModelScope's download bars, for which it has no switch, unless bars may be drawn."""
    if "modelscope_hub" not in sys.modules or has_bars():
        yield
        return
    downloads = importlib.import_module("modelscope_hub._download")
    bar = downloads.tqdm
    downloads.__dict__["tqdm"] = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        downloads.__dict__["tqdm"] = bar


class Unfinished:
    """Marks a download that has started and not finished, so that a partial folder is not used as a complete one."""

    def __init__(self, *key: str) -> None:
        """Identify the download by place, revision, type and patterns."""
        from twinkle.paths import cache_dir

        name = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self._mark: Path = cache_dir("hub", "unfinished") / name

    def __bool__(self) -> bool:
        return self._mark.exists()

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Set the mark, and clear it after the block unless the block raises."""
        self._mark.touch()
        yield
        self._mark.unlink(missing_ok=True)

"""How a download shows itself (bars on a terminal, lines in a file), and what is known of one that was cut off."""

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
_SLOW = 2.0  # seconds; what is faster needs no line


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) forbids the network; it counts for every hub."""
    return any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def has_bars() -> bool:
    """Return whether bars may be drawn: on a terminal, and not beside what the main thread draws there."""
    return sys.stderr.isatty() and threading.current_thread() is threading.main_thread()


@contextmanager
def shown(what: str, *, new: bool) -> Iterator[None]:
    """Show a download: the client's bars on a terminal, else a line before it (if it is new) and one after it."""
    from twinkle.logging import get_logger

    begun = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(quiet_modelscope())
        stack.enter_context(_plain_modelscope())
        stack.enter_context(without_bars(*(["huggingface_hub.utils"] if "huggingface_hub" in sys.modules else [])))
        if new and not has_bars():
            get_logger().info("fetching %s", what)
        yield
    if new and not has_bars() and (seconds := time.monotonic() - begun) > _SLOW:
        get_logger().info("fetched %s in %.0f s", what, seconds)


@contextmanager
def quiet_modelscope() -> Iterator[None]:
    """Keep ModelScope's log and its printed reports away: what matters of them it raises as well."""
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
    """Hold back the bars of client libraries where none may be drawn.

    Args:
        *modules: where a library has the switches `disable_progress_bars` and `enable_progress_bars`.
    """
    with ExitStack() as stack:
        for module in modules if not has_bars() else ():
            _switch_off(module, stack)
        yield


def _switch_off(module: str, stack: ExitStack) -> None:
    client = importlib.import_module(module)
    if client.are_progress_bars_disabled():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variable of the user's decides for bars, and it says so
        client.disable_progress_bars()
    stack.callback(client.enable_progress_bars)


@contextmanager
def _plain_modelscope() -> Iterator[None]:
    """Hold back ModelScope's bars where none may be drawn; it has no switch for those of downloads."""
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
    """A note that a download has begun and not ended, so that a half-filled folder is not taken for a whole one."""

    def __init__(self, *key: str) -> None:
        """Name the download: place, revision, kind and patterns."""
        from twinkle.paths import cache_dir

        name = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self._note: Path = cache_dir("hub", "unfinished") / name

    def __bool__(self) -> bool:
        return self._note.exists()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Keep the note for as long as the block runs, and afterwards if it fails."""
        self._note.touch()
        yield
        self._note.unlink(missing_ok=True)

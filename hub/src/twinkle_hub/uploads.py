"""Uploads in the background: one thread, in the order of the calls; each can be awaited, and none fails silently."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twinkle.errors import HubError

_lock = threading.Lock()
_worker: ThreadPoolExecutor | None = None


class Upload:
    """An upload that runs or has run: `await upload`, or `upload.result()`.

    A failure is logged when it happens, and raised where the result is requested. The process does not end before its
    uploads have.

    Attributes:
        reference: where it goes.
    """

    def __init__(self, reference: str, future: "Future[str]") -> None:
        """Wrap the future of the worker thread."""
        self.reference = reference
        self._future = future

    def result(self, timeout: float | None = None) -> str:
        """Wait, and return the address of the repository.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it still runs.
            HubError: it failed.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return why it failed, or None."""
        return self._future.exception(timeout)

    def __await__(self) -> Generator[Any, None, str]:
        return asyncio.wrap_future(self._future).__await__()


def begin(reference: str, folder: Path, push: Callable[[Path], str]) -> Upload:
    """Push a folder in the background, as it is now: what replaces its files later is not uploaded.

    Args:
        reference: where it goes, for messages.
        folder: what to push.
        push: does it, given the folder to read from.

    Raises:
        HubError: there is no such folder.
    """
    global _worker
    kept = _kept(folder)

    def work() -> str:
        from twinkle.logging import get_logger

        try:
            address = push(kept)
        except BaseException as error:
            get_logger().error("upload to %s failed: %s", reference, error)
            raise
        finally:
            shutil.rmtree(kept, ignore_errors=True)
        get_logger().info("uploaded to %s", address)
        return address

    with _lock:
        if _worker is None:
            _worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="twinkle-upload")
            _wait_at_exit(_worker)
        return Upload(reference, _worker.submit(work))


def _wait_at_exit(worker: ThreadPoolExecutor) -> None:
    """Let the process wait for its uploads while threads may still begin others, as the clients' uploads do.

    `atexit` is too late: before it, Python has told every pool of threads to take no more work.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(worker.shutdown)


def _kept(folder: Path) -> Path:
    """Return a copy of a folder beside it, made of hard links where the file system has them."""
    if not folder.is_dir():
        raise HubError(f"cannot upload {folder}: there is no such folder; give the folder of a checkpoint")
    kept = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".upload", dir=folder.absolute().parent))
    try:
        shutil.copytree(folder, kept, copy_function=_link, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(kept, ignore_errors=True)
        raise
    return kept


def _link(source: str, target: str) -> str:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return target
    return str(shutil.copy2(source, target))

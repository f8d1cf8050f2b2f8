"""Uploads in the background, in one thread and in the order of the calls. Failures are logged and raised to waiters."""

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
    """A running or finished upload: `await upload`, or `upload.result()`.

    A failure is logged when it happens, and raised when the result is requested. The process waits for its uploads
    before it exits.

    Attributes:
        reference: target of the upload.
    """

    def __init__(self, reference: str, future: "Future[str]") -> None:
        """Wrap the future of the worker thread."""
        self.reference = reference
        self._future = future

    def result(self, timeout: float | None = None) -> str:
        """Wait, and return the address of the repository.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: the upload is still running.
            HubError: the upload failed.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether it has finished, successfully or not."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return its exception, or None."""
        return self._future.exception(timeout)

    def __await__(self) -> Generator[Any, None, str]:
        return asyncio.wrap_future(self._future).__await__()


def begin(reference: str, folder: Path, push: Callable[[Path], str]) -> Upload:
    """Upload the current content of a folder in the background; later changes to the folder are not uploaded.

    Args:
        reference: target of the upload, for messages.
        folder: folder to upload.
        push: uploads the folder that it is called with.

    Raises:
        HubError: there is no such folder.
    """
    global _worker
    snapshot = _snapshot_of(folder)

    def work() -> str:
        from twinkle.logging import get_logger

        try:
            address = push(snapshot)
        except BaseException as error:
            get_logger().error("upload to %s failed: %s", reference, error)
            raise
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)
        get_logger().info("uploaded to %s", address)
        return address

    with _lock:
        if _worker is None:
            _worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="twinkle-upload")
            _wait_at_exit(_worker)
        return Upload(reference, _worker.submit(work))


def _wait_at_exit(worker: ThreadPoolExecutor) -> None:
    """Wait for the uploads at exit, while threads can still start new ones, as the clients do.

    `atexit` is too late: Python has shut down all thread pools before.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(worker.shutdown)


def _snapshot_of(folder: Path) -> Path:
    """Return a copy of a folder next to it, made of hard links if the file system supports them."""
    if not folder.is_dir():
        raise HubError(f"cannot upload {folder}: there is no such folder; give the folder of a checkpoint")
    snapshot = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".upload", dir=folder.absolute().parent))
    try:
        shutil.copytree(folder, snapshot, copy_function=_link, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(snapshot, ignore_errors=True)
        raise
    return snapshot


def _link(source: str, target: str) -> str:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return target
    return str(shutil.copy2(source, target))

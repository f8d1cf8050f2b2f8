"""Starts the first process of a tree of workers."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from twinkle_server.environment import scrubbed
from twinkle_server.workers.child import Child
from twinkle_server.workers.framing import Frames

_NO_DEVICES: Final = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
"""Workers compute on the CPU; a context on a device would take memory of the model."""
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Processes with threads cannot be forked safely."""


def start_first(
    module: str, frames: Frames, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    most_body: int = 2**20,
) -> Child:  # fmt: skip
    """Start a process with one inherited socket and without secrets in its environment.

    Args:
        module: run as `python -m MODULE DESCRIPTOR ...`.
        frames: reads and writes frames.
        arguments: for the module, after the descriptor.
        environment: additional variables.
        most_body: see `Child`.
    """
    ours, theirs = socket.socketpair()
    try:
        variables = scrubbed(os.environ) | _NO_DEVICES | _ONE_THREAD | dict(environment or {})
        variables.pop("FAILPOINT", None)
        variables["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()

    def ended() -> int | None:
        try:
            return process.wait(3.0)  # it ends when its socket is closed
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    child = Child(ours, None, 0, frames, ended, most_body)
    child.pid = process.pid
    return child

"""The command `twinkle` as a process: how several of it are started, and Ctrl-C while it imports."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from twinkle.errors import ConfigError
from twinkle.platform import Platform

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a first Ctrl-C at the end of the block, whatever came of it; a second one at once.

    Outside the main thread, where signals cannot be listened for, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            raise KeyboardInterrupt
        heard = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            raise KeyboardInterrupt


EXIT_INTERRUPTED = 130


def process_count(text: str | None) -> int:
    """Return how many processes `--nproc` asks for; 1 where it is not given.

    Raises:
        ConfigError: it is no number from 1 on, or the processes are started already.
    """
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc {text}: give the number of processes, from 1 on")
    if "WORLD_SIZE" in os.environ and int(text) != Platform.get_world_size():
        raise ConfigError(
            f"--nproc {text}: torchrun has started {Platform.get_world_size()} processes already; leave --nproc out"
        )
    return 1 if "WORLD_SIZE" in os.environ else int(text)


def check_mesh(mesh: "DeviceMesh | None", processes: int) -> None:
    """Refuse a mesh that needs other processes than there are, before any is started.

    Raises:
        ConfigError: with the number that `--nproc` should give.
    """
    if mesh is None or mesh.world_size == processes:
        return
    there = "1 process" if processes == 1 else f"{processes} processes"
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(f"the mesh {mesh} has {mesh.world_size} ranks, and torchrun has started {there}")
    advice = f"--nproc {mesh.world_size}" if mesh.world_size > 1 else "no --nproc"
    raise ConfigError(
        f"the mesh {mesh} has {mesh.world_size} ranks, but this would be {there}; give {advice}, or sizes that "
        f"multiply to {processes}"
    )


def start_ranks(processes: int, arguments: Sequence[str]) -> int:
    """Let torchrun start `twinkle ARGUMENTS` that many times on this machine.

    Returns the exit code of the first rank to fail, or 0. Ctrl-C and SIGTERM are passed on to the ranks, which have ten
    minutes to save what they have.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # Threads of several processes that share the cores of a CPU would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    parser = get_args_parser()
    patience = ["--shutdown-timeout=600"] if "--shutdown-timeout" in parser.format_help() else []  # older ones lack it
    launcher = ["--standalone", f"--nproc_per_node={processes}", *patience, "-m", "twinkle_cli"]
    try:
        run(parser.parse_args([*launcher, *without_nproc(arguments)]))  # type: ignore[no-untyped-call]
    except SignalException:
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    return 0


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--nproc N`, which torchrun would take for a flag of its own."""
    rest, kept = iter(arguments), []
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept

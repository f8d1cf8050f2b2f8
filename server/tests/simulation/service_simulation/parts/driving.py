"""Parts of the service alone, driven at random on the simulated clock, each compared with a model of it."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from unittest import mock

from service_simulation.disk import shared_engine
from service_simulation.parts.arrivals import hear_sessions, watch_arrivals
from service_simulation.parts.blobs import keep_blobs, lose_files
from service_simulation.parts.checkpoints import keep_checkpoints, keep_records
from service_simulation.parts.chores import count_turns, do_chores
from service_simulation.parts.commits import commit_together
from service_simulation.parts.directories import open_directories, refuse_directories
from service_simulation.parts.effects import change_records
from service_simulation.parts.futures import wait_for_futures
from service_simulation.parts.gaps import give_up_gaps
from service_simulation.parts.log import keep_log
from service_simulation.parts.model_queue import change_states, order_numbers
from service_simulation.parts.models import keep_models, keep_samplers
from service_simulation.parts.outcomes import write_outcomes
from service_simulation.parts.runtime import run_operations
from service_simulation.parts.sessions import keep_sessions
from service_simulation.parts.supervisor import supervise
from service_simulation.parts.window import share_room
from service_simulation.virtual import Clock, Still, VirtualLoop, replaced_modules

from twinkle_server.store import database

Part = Callable[[Clock, random.Random], Awaitable[None]]
OF_RUNTIME: tuple[Part, ...] = (
    order_numbers,
    change_states,
    share_room,
    wait_for_futures,
    watch_arrivals,
    hear_sessions,
    give_up_gaps,
    count_turns,
    do_chores,
    write_outcomes,
    supervise,
    run_operations,
)
"""Parts of the runtime; most take milliseconds."""
OF_STORE: tuple[Part, ...] = (
    change_records,
    keep_sessions,
    keep_models,
    keep_samplers,
    keep_checkpoints,
    keep_records,
    keep_log,
    open_directories,
    refuse_directories,
    commit_together,
    keep_blobs,
    lose_files,
)
AT_ONCE = 4
"""Parts of the runtime that a simulation drives, beside one of the store."""


def all_parts() -> list[Part]:
    """Return all parts."""
    return [*OF_RUNTIME, *OF_STORE]


def drive_parts(seed: int) -> None:
    """Drive some parts, each in a loop of its own.

    Raises:
        Violation: one broke a promise.
    """
    for part in parts_of(seed):
        drive(part, seed)


def parts_of(seed: int) -> list[Part]:
    """Return the parts that the simulation of a seed drives."""
    return [*random.Random(f"parts {seed}").sample(OF_RUNTIME, AT_ONCE), OF_STORE[seed % len(OF_STORE)]]


def drive(part: Part, seed: int) -> None:
    """Drive one part."""
    clock = Clock()
    loop = VirtualLoop(clock, Still(seed))
    loop.set_exception_handler(lambda loop, context: None)
    logger = logging.getLogger("twinkle_server")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.CRITICAL + 1)
    logger.propagate = False
    try:
        with (
            replaced_modules(clock, random.Random(f"ids {seed}")),
            mock.patch.object(database, "engine", shared_engine),
        ):
            try:
                loop.run_until_complete(part(clock, random.Random(f"{part.__name__} {seed}")))
            finally:
                while left := asyncio.all_tasks(loop):
                    for task in left:
                        task.cancel()
                    loop.run_until_complete(asyncio.wait(left, timeout=1.0))
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        loop.close()

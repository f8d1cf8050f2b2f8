"""Files of large payloads and results."""

import os
import random
import stat
from collections.abc import Callable
from typing import Any
from unittest import mock

from service_simulation.parts.support import folder, opened, refused, synced
from service_simulation.reference import demand
from service_simulation.virtual import Clock

from twinkle_server import failpoints
from twinkle_server.errors import Unavailable
from twinkle_server.operations import Submission
from twinkle_server.store.blobs import Blobs
from twinkle_server.store.records import Session


async def keep_blobs(clock: Clock, draw: random.Random) -> None:
    """Files are durable before their names are told, and are what was written."""
    with folder() as root:
        place = root / "payloads"
        place.mkdir()
        blobs, kept = Blobs(place), dict[str, bytes]()
        for number in range(15):
            data = draw.choice([b"", b"x", b"y" * 5000, bytes([number])])
            fails = draw.choice(["", "", "blob.before_rename", "blob.after_rename"])
            order: list[str] = []

            def reached(where: str, fails: str = fails, order: list[str] = order) -> None:
                order.append(where)
                if where == fails:
                    raise OSError(28, "No space left on device")

            before = failpoints.watch(reached)
            try:
                with synced() as done:
                    if fails:
                        await refused(blobs.put(data), Unavailable, "disk full or failing")
                    else:
                        name = await blobs.put(data)
                        demand(name not in kept, "two files have a name")
                        kept[name] = data
                        demand(done[0].startswith(".tmp-") and done[1:] == ["payloads"], f"{done} was synced")
                        demand(stat.S_IMODE((place / name).stat().st_mode) == 0o600, "its mode")
            finally:
                failpoints.watch(before)
            if kept and draw.random() < 0.3:
                gone = draw.sample(sorted(kept), 1)
                await blobs.drop([*gone, "0" * 64 + "-" + "0" * 16, *gone])
                for each in gone:
                    del kept[each]
                    await refused(blobs.get(each), LookupError, "cannot read file")
            demand({path.name for path in place.iterdir()} == set(kept), "which files are there")
            for each, text in kept.items():
                demand(await blobs.get(each) == text, "a file is another")
        await blobs.drop([])
        if kept:
            name = draw.choice(sorted(kept))
            (place / name).write_bytes(kept[name] + b"!")
            await refused(blobs.get(name), LookupError, "does not match its checksum")
        for wrong in ("../secret", "", "0" * 64, "0" * 64 + "-" + "0" * 17):
            await refused(blobs.get(wrong), LookupError, "is not a valid file name in payloads")
        real = os.open
        with mock.patch.object(os, "open", lambda *values, **more: _broken(real, *values, **more)):
            await refused(blobs.put(b"x"), Unavailable)
        demand({path.name for path in place.iterdir()} == set(kept), "a file of which nothing was written is left")
        blobs.close()


def _broken(real: Callable[..., int], path: Any, *values: Any, **more: Any) -> int:
    if ".tmp-" in str(path):
        raise OSError(28, "No space left on device")
    return real(path, *values, **more)


async def lose_files(clock: Clock, draw: random.Random) -> None:
    """What the log names and the disk has lost is told; a commit that fails leaves no file."""
    from twinkle_server.operations import Outcome
    from twinkle_server.settings import Limits

    with opened(draw, limits=Limits(small_bytes=10)) as store:
        journal = store.journal
        await store.sessions.create(Session("s", "ada", 1.0, 1.0))
        big = b"p" * 11
        accepted, operation = await journal.submit(Submission("ada", "s:sample:0", "sample", big, 0))
        await journal.finish([Outcome(operation.id, b"r" * 11)])

        def full(place: str) -> None:
            if place == "store.before_commit":
                raise OSError(28, "No space left on device")

        before = failpoints.watch(full)
        try:
            await refused(journal.submit(Submission("ada", "s:sample:0", "sample", big, 1)), Unavailable)
            await refused(journal.finish([Outcome(operation.id, b"r" * 11)]), Unavailable)
        finally:
            failpoints.watch(before)
        demand(len(list((store.data / "payloads").iterdir())) == 0, "payloads of what was never written are kept")
        results = list((store.data / "results").iterdir())
        demand(len(results) == 1, "results of what was never written are kept")
        demand((await journal.future(accepted.request, "ada")).result == b"r" * 11, "a result in a file")
        results[0].unlink()
        future = await journal.future(accepted.request, "ada")
        demand(
            (future.status, future.category) == ("failed", "server") and "result was lost" in str(future.error),
            f"{future}",
        )

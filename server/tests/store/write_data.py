"""Writes the data folder of this version's server as `kill -9` leaves it: what the next version must open.

`python server/tests/store/write_data.py`, once for each version of the schema, while it is the newest one; the folder
that it makes is never changed afterwards. `test_stored_data` says what is in it.
"""

import json
import shutil
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/support"))

from server_raw import Failed, Raw, row, tokens_of
from serving import Served, ledger

from twinkle_server.store.schema import VERSIONS

DATA = Path(__file__).with_name("data")
TIMES = {"poll": 2.0, "snapshot": 1e6}
SETTINGS = {"auth": True, "times": TIMES, "snapshot_steps": 2, "limits": {"small_bytes": 512}}
SECONDS = 30.0


def work(raw: Raw) -> dict[str, Any]:
    """Ask for something of every kind, and leave two operations waiting; return what the rows must still know."""
    model, over = raw.model(), raw.model()
    raw.result(over.submit("unload_model"))
    for token in (5, 6):
        model.forward_backward([row([token, 2, 3])])
        model.step()
    settled = model.last
    model.forward_backward([row([7, *range(2, 120)])])
    model.step()
    path = model.save("kept", user_metadata={"note": "of an older server"})
    sampler = model.freeze(0)
    first = raw.result(asked := str(sampler.submit([1, 2], params={"max_tokens": 9})["request_id"]), "sample")
    try:
        model.forward([row([1, 2])], "no_such_loss")
    except Failed as failed:
        refused = failed.error
    missing = model.next()
    waiting = [model.submit_pass([row([8, 2, 3])]), model.submit("optim_step", adam_params={})]
    return {
        "model": model.id, "settled": settled, "checkpoint": path, "sampler": sampler.id, "refused": refused,
        "sampled": {"request": asked, "tokens": tokens_of(first.sequences[0])}, "missing": missing, "waiting": waiting,
    }  # fmt: skip


def settle(database: Path, model: str, number: int) -> None:
    """Wait until a snapshot of a model has a row."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT snapshot_number FROM models WHERE id = ?", (model,)).fetchone()
        if found[0] == number:
            return
        time.sleep(0.05)
    raise AssertionError("no snapshot came")


def store(data: Path, place: Path, facts: dict[str, Any]) -> None:
    """Write a data folder as text, and the files that its rows name."""
    place.mkdir(parents=True)
    with closing(sqlite3.connect(data / "twinkle.db")) as database:
        database.execute("UPDATE lease SET host = 'elsewhere', boot = 'another', pid = 4242, started = 1")
        database.commit()
        (place / "twinkle.sql").write_text("\n".join(database.iterdump()) + "\n")
    for folder in ("snapshots", "checkpoints", "payloads", "results"):
        shutil.copytree(data / folder, place / folder)
    facts["secret"] = (data / "secret").read_bytes().hex()
    (place / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def main() -> None:
    """Write the folder of the newest version."""
    place = DATA / VERSIONS[-1]
    if place.exists():
        sys.exit(f"{place.name} is there already, and a stored version is never changed")
    with tempfile.TemporaryDirectory() as folder:
        served: Served = ledger(Path(folder) / "data", SETTINGS).start()
        try:
            key = served.new_key("ana")
            with Raw(served.url, key) as raw:
                facts = work(raw)
            settle(served.data / "twinkle.db", facts["model"], facts["settled"])
        finally:
            served.kill()
        store(served.data, place, {"key": key, **facts})


if __name__ == "__main__":
    main()

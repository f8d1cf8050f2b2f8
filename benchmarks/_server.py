"""The service in a process of its own, with an engine that computes nothing, and connections that cost little."""

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from ledger_engine import MODEL  # found by the path above

from twinkle_server.wire import tinker_pb2 as wire

PROTOBUF = "application/x-protobuf"
ENGINE = f"{Path(__file__).resolve().with_name('_null_engine.py')}:NullEngine"
PACKAGES = ["twinkle-server", "fastapi", "uvicorn", "uvloop", "httptools", "protobuf", "sqlalchemy"]
_PROCESS = """
import json, sys
from pathlib import Path
import twinkle_server.serve as serving
from twinkle_server.settings import Settings
if sys.argv[2] == "memory":
    from twinkle_server.store.memory import MemoryJournal
    real = serving.open_store
    def opened(*arguments, **options):
        store = real(*arguments, **options)
        durable = store.journal
        store.journal = MemoryJournal(store.database, store.secret)
        store.journal.close = durable.close
        return store
    serving.open_store = opened
fields = json.loads(sys.argv[1])
sys.exit(serving.serve(Settings(**dict(fields, data=Path(fields["data"])))))
"""


@contextmanager
def served(folder: Path, journal: str, **settings: Any) -> Iterator[str]:
    """Run the service and give its address.

    Args:
        folder: for its data folder, of the name of the journal.
        journal: "durable" as shipped, or "memory", which forgets.
        **settings: further fields of `Settings`.
    """
    fields = {
        "model": str(MODEL), "name": "null", "backend": ENGINE, "auth": False, "port": 0,
        "data": str(folder / journal), **settings,
    }  # fmt: skip
    with _running([sys.executable, "-c", _PROCESS, json.dumps(fields), journal]) as url:
        yield url


@contextmanager
def floor() -> Iterator[str]:
    """Run the least that answers the protocol (`_floor.py`), and give its address."""
    with _running([sys.executable, str(Path(__file__).with_name("_floor.py"))]) as url:
        yield url


@contextmanager
def _running(command: list[str]) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        for line in process.stdout:
            if address := re.search(r"at (http://\S+)", line):
                yield address[1]
                break
        else:
            raise SystemExit("the service did not start")
    finally:
        process.terminate()
        process.wait(60)


def pass_body(model: str, number: int, tokens: int, sampled: bool = False) -> bytes:
    """Return the body of one `forward_backward` of one row; a sampled one has log-probabilities and advantages."""
    loss = "importance_sampling" if sampled else "cross_entropy"
    body = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss)
    row = body.data.add()
    ids = np.arange(1, tokens + 1)
    row.model_input.add().encoded_text.tokens = ids.astype("<i4").tobytes()
    values = {"target_tokens": (ids.astype("<i8"), wire.DTYPE_INT64)}
    for name in ("logprobs", "advantages") if sampled else ("weights",):
        values[name] = np.ones(tokens, "<f4"), wire.DTYPE_FLOAT32
    for name, (array, kind) in values.items():
        row.loss_fn_inputs[name].CopyFrom(wire.Tensor(dense=array.tobytes(), dtype=kind, shape=[tokens]))
    return body.SerializeToString()


class Connection:
    """One connection that is kept, over the standard library's client."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.http = http.client.HTTPConnection(host, int(port), timeout=60)

    def post(self, path: str, body: bytes, kind: str = "application/json", accept: str = "*/*") -> bytes:
        """Send a request and return the answer's body, which must be good."""
        headers = {"Content-Type": kind, "Accept": accept, "X-API-Key": "tml-benchmark"}
        self.http.request("POST", f"/api/v1{path}", body, headers)
        answer = self.http.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {content[:300]!r}")
        return content

    def json(self, path: str, **fields: Any) -> dict[str, Any]:
        """Send JSON and return JSON."""
        found: dict[str, Any] = json.loads(self.post(path, json.dumps(fields).encode()))
        return found

    def result(self, request: str) -> bytes:
        """Wait for a future and return its bytes."""
        body = json.dumps({"request_id": request, "allow_metadata_only": False}).encode()
        while True:
            content = self.post("/retrieve_future", body, accept=PROTOBUF)
            if not content.startswith(b'{"type":"try_again"'):
                if content.startswith(b'{"error"'):
                    raise SystemExit(content.decode())
                return content

    def model(self) -> str:
        """Make a model in a session of its own and return its id."""
        session = self.json("/create_session")["session_id"]
        lora = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": True}
        asked = self.json("/create_model", session_id=session, model_seq_id=0, base_model="null", lora_config=lora)
        self.result(asked["request_id"])
        return f"{session}:train:0"

    def forward_backward(self, model: str, number: int, tokens: int) -> bytes:
        """Do one pass from submission to result."""
        sent = self.post("/forward_backward", pass_body(model, number, tokens), PROTOBUF)
        return self.result(json.loads(sent)["request_id"])


def fsync_ms(folder: Path, repetitions: int = 50) -> float:
    """Return the median milliseconds that this machine's disk takes to write 4 KiB for good."""
    times = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(repetitions):
            file.write(b"x" * 4096)
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)

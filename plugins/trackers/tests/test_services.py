"""The trackers of services against the real libraries, where they are installed: offline, in files, on this machine.

`make soak` installs each library in an environment of its own and runs this file there.
"""

import contextlib
import json
import math
import os
import sqlite3
import struct
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from receivers import serving

from twinkle import Run

CONFIG = {"model": {"id": "tiny"}, "epochs": 2, "names": ["a", "b"], "none": None}
ABSENT = "is not installed here; make soak installs it in an environment of its own"
Steps = dict[int, dict[str, float]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the libraries a home of this test, and no place or account of the person who runs it."""
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "WANDB_MODE", "WANDB_DIR", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")


def train(tracker: Any, folder: Path, steps: range, error: BaseException | None = None) -> Path:
    """Make a run, or go on with the one in the folder, and return its folder; `loss` is 1 over the step."""
    begun = next(iter(sorted(folder.glob("trial-*"))), None)
    run = Run("trial", config=CONFIG, trackers=[tracker], root=folder, folder=begun)
    with contextlib.suppress(*[] if error is None else [type(error)]), run:
        for step in steps:
            run.log({"loss": 1 / step, "eval/loss": 2.0, "note": "text"}, step)
        if error is not None:
            raise error
    return run.folder


def expected(steps: range) -> Steps:
    return {step: {"loss": 1 / step, "eval/loss": 2.0} for step in steps}


def assert_home_is_untouched() -> None:
    """Only what a library keeps of itself (caches, telemetry) may lie outside of the run's folder: no run does."""
    found = [path for path in Path.home().rglob("*") if path.is_file()]
    assert not [path for path in found if path.suffix in (".db", ".wandb", ".swanlab") or "mlruns" in path.parts]


# MLflow


def mlflow_of(folder: Path) -> tuple[Any, str]:
    mlflow = pytest.importorskip("mlflow")
    database = folder / "mlflow.db"
    place = f"sqlite:///{database}" if database.exists() else (folder / "mlruns").as_uri()
    return mlflow.MlflowClient(tracking_uri=place), (folder / "mlflow.id").read_text().strip()


def mlflow_steps(folder: Path) -> Steps:
    client, identity = mlflow_of(folder)
    found: Steps = {}
    for name in client.get_run(identity).data.metrics:
        for metric in client.get_metric_history(identity, name):
            assert name not in found.setdefault(metric.step, {}), "a step stands there twice"
            found[metric.step][name] = metric.value
    return found


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_numbers_configuration_and_end(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=f"mlflow {ABSENT}")
    folder = train("MLflowTracker", tmp_path, range(1, 4))
    client, identity = mlflow_of(folder)
    run = client.get_run(identity)
    assert mlflow_steps(folder) == expected(range(1, 4))
    assert run.info.run_name == folder.name
    assert run.info.status == "FINISHED"
    assert run.data.params == {"model.id": "tiny", "epochs": "2", "names": "['a', 'b']", "none": "None"}
    assert client.get_experiment(run.info.experiment_id).name == "twinkle"
    assert_home_is_untouched()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_mlflow_knows_how_a_run_ended_and_goes_on_with_it(error: BaseException, status: str, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=f"mlflow {ABSENT}")
    from twinkle_trackers.mlflow import MLflowTracker

    tracker = MLflowTracker(experiment="mine", name="first", tags={"who": "me"})
    folder = train(tracker, tmp_path, range(1, 5), error)
    client, identity = mlflow_of(folder)
    assert client.get_run(identity).info.status == status
    assert client.get_run(identity).data.tags["who"] == "me"
    train(MLflowTracker(experiment="mine"), tmp_path, range(3, 7))
    assert mlflow_of(folder)[1] == identity
    assert client.get_run(identity).info.status == "FINISHED"
    assert mlflow_steps(folder) == expected(range(1, 7))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_numbers_that_are_not_finite(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=f"mlflow {ABSENT}")
    with Run("trial", trackers=["MLflowTracker"], root=tmp_path) as run:
        run.log({"loss": math.nan, "accuracy": 0.5}, 1)
        run.log({"loss": 1.0}, 2)
    found = mlflow_steps(run.folder)
    assert found[1]["accuracy"] == 0.5
    assert found[2] == {"loss": 1.0}


class Server(ThreadingHTTPServer):
    """Takes what MLflow's client posts, and knows nothing."""

    answers: ClassVar[dict[str, Any]] = {
        "experiments/get-by-name": {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no"},
        "experiments/create": {"experiment_id": "1"},
        "runs/create": {"run": {"info": {"run_id": "abc", "experiment_id": "1", "status": "RUNNING"}, "data": {}}},
        "runs/get": {"run": {"info": {"run_id": "abc", "experiment_id": "1", "status": "RUNNING"}, "data": {}}},
    }

    class Handler(BaseHTTPRequestHandler):
        server: "Server"

        def do_POST(self) -> None:
            name = self.path.partition("?")[0].partition("mlflow/")[2]
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            self.server.received.append((name, body))
            answer = json.dumps(self.server.answers.get(name, {})).encode()
            self.send_response(404 if b"error_code" in answer else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            """Stay quiet."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.received: list[tuple[str, Any]] = []


@pytest.mark.filterwarnings("ignore")
def test_mlflow_sends_a_run_to_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason=f"mlflow {ABSENT}")
    from twinkle_trackers.mlflow import MLflowTracker

    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    with serving(server):
        train(MLflowTracker(tracking_uri=f"http://127.0.0.1:{server.server_port}"), tmp_path, range(1, 3))
    sent = [body["metrics"] for name, body in server.received if name == "runs/log-batch" and "metrics" in body]
    assert [{metric["step"]: (metric["key"], metric["value"]) for metric in batch[:1]} for batch in sent] == [
        {1: ("loss", 1.0)},
        {2: ("loss", 0.5)},
    ]
    assert server.received[-1][0] == "runs/update"
    assert server.received[-1][1]["status"] == "FINISHED"
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_is_away_costs_one_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason=f"mlflow {ABSENT}")
    from twinkle_trackers.mlflow import MLflowTracker

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    train(MLflowTracker(tracking_uri="http://127.0.0.1:9"), tmp_path, range(1, 4))
    told = [text for text in caplog.messages if text.startswith("MLflowTracker")]
    assert len(told) == 1
    assert told[0].startswith("MLflowTracker: nothing more of this run is recorded: MlflowException: ")


# Trackio


def trackio_steps(database: Path) -> Steps:
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    connection.close()
    assert len({step for step, _ in rows}) == len(rows), "a step stands there twice"
    return {step: json.loads(metrics) for step, metrics in rows}


@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_each_run_in_its_own_folder_and_goes_on_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio", reason=f"trackio {ABSENT}")
    one, two = tmp_path / "one", tmp_path / "two"
    first = train("TrackioTracker", one, range(1, 5))
    second = train("TrackioTracker", two, range(1, 3))
    train("TrackioTracker", one, range(3, 7))
    assert trackio_steps(first / "trackio" / "twinkle.db") == expected(range(1, 7))
    assert trackio_steps(second / "trackio" / "twinkle.db") == expected(range(1, 3))
    assert "TRACKIO_DIR" not in os.environ
    assert capsys.readouterr().out == ""
    assert_home_is_untouched()


# Weights & Biases


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records in wandb's files: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        data, place, parts = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if (left := 32_768 - place % 32_768) < 7:
                place += left
                continue
            _, length, part = struct.unpack_from("<IHB", data, place)
            parts += data[place + 7 : place + 7 + length]
            place += 7 + length
            if part in (1, 4):  # a whole record, or the last part of one
                record = wandb_internal_pb2.Record()
                record.ParseFromString(parts)
                yield record
                parts = b""


def wandb_steps(folder: Path) -> Steps:
    found: Steps = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            own = {name: value for name, value in items.items() if not name.startswith("_")}
            found[record.history.step.num] = own
    return found


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_numbers_configuration_and_end_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=f"wandb {ABSENT}")
    from twinkle_trackers.wandb import WandbTracker

    folder = train(WandbTracker(mode="offline", group="g", tags="t"), tmp_path, range(1, 4), ValueError("no"))
    assert wandb_steps(folder) == expected(range(1, 4))
    records = list(wandb_records(folder))
    begun = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (begun.run_id, begun.display_name) == ((folder / "wandb.id").read_text().strip(), folder.name)
    assert (begun.project, begun.run_group, list(begun.tags)) == ("twinkle", "g", ["t"])
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert {name: config[name] for name in CONFIG} == CONFIG
    ends = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    assert ends == [1]
    train(WandbTracker(mode="offline"), tmp_path, range(3, 6))
    again = [record.run.run_id for record in wandb_records(folder) if record.WhichOneof("record_type") == "run"]
    assert set(again) == {begun.run_id}
    assert wandb_steps(folder) == expected(range(1, 6))
    assert_home_is_untouched()


# SwanLab


@pytest.mark.filterwarnings("ignore")
def test_swanlab_keeps_numbers_and_configuration_offline(tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason=f"swanlab {ABSENT}")
    import sys

    from twinkle_trackers.swanlab import SwanLabTracker

    hook = sys.excepthook
    folder = train(SwanLabTracker(mode="offline"), tmp_path, range(1, 4), ValueError("no"))
    assert sys.excepthook is hook
    identity = (folder / "swanlab.id").read_text().strip()
    (place,) = (folder / "swanlog").glob(f"run-*-{identity}")
    kept = (place / f"run-{identity}.swanlab").read_bytes()
    assert all(word in kept for word in (b"loss", b"eval/loss", b"ValueError: no", folder.name.encode()))
    assert "tiny" in (place / "files" / "config.yaml").read_text("utf-8")
    assert_home_is_untouched()

"""The tracker that records a run with MLflow."""

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.tracker import Tracker
from twinkle_registry import hookimpl
from twinkle_trackers.background import Background
from twinkle_trackers.service import Health, careful, check_text, flat, kept_id, numbers

if TYPE_CHECKING:
    from twinkle.run import Run

_LONGEST_PARAMETER = 500  # letters; servers before MLflow 2 refuse more
_PARAMETERS_A_CALL = 100
_CLOSING_SECONDS = 60.0


class MLflowTracker(Tracker):
    """Records configuration, numbers and end of a run with `mlflow` (or `mlflow-skinny`).

    It records to `tracking_uri`, else to `MLFLOW_TRACKING_URI`, else below `run.folder`: to the database `mlflow.db`,
    or, where mlflow-skinny is installed alone, to the folder `mlruns`. Answers are waited for in a thread. A run that
    continues in its folder goes on under the same id, kept in `mlflow.id`; steps that are there already stay as they
    are. An error of mlflow is logged once and leaves the run alone. MLflow's telemetry is off unless
    `MLFLOW_DISABLE_TELEMETRY` is set to something else.

    Args:
        experiment: the experiment there; it is made where it is missing.
        name: what the run is called there; by default the name of its folder.
        tracking_uri: where MLflow records, such as `http://host:5000`.
        tags: labels of the run, names with texts.

    Raises:
        ArgumentError: an argument does not fit.
    """

    def __init__(
        self,
        experiment: str = "twinkle",
        name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        check_text("MLflowTracker", "experiment", experiment)
        self.experiment, self.name, self.tracking_uri, self.tags = experiment, name, tracking_uri, dict(tags or {})
        self.health = Health()
        self._client: Any = None
        self._calls: Background | None = None
        self._id = ""
        self._after = -1
        self._status = "FINISHED"

    @hookimpl
    def twinkle_run_start(self, run: "Run") -> None:
        """Begin the run there, or go on with it."""
        self.health.lost, self._status = False, "FINISHED"
        self._open(run)

    @hookimpl
    @careful
    def twinkle_step_end(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`."""
        if self._calls is None:
            self._open(run)
        if self._calls is None or step <= self._after:
            return
        if self._calls.error is not None:
            raise self._calls.error
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(name, float(value), now, step) for name, value in numbers(metrics).items()]
        client, identity = self._client, self._id
        self._calls.add(lambda: client.log_batch(identity, metrics=batch))

    @hookimpl
    def twinkle_run_error(self, run: "Run", error: BaseException) -> None:
        """Remember how the run ends."""
        self._status = "FAILED" if isinstance(error, Exception) else "KILLED"

    @hookimpl
    def twinkle_run_end(self, run: "Run") -> None:
        """Send what is left, and the end: finished, failed or (stopped by somebody) killed."""
        calls, client, self._calls, self._client = self._calls, self._client, None, None
        if calls is not None:
            self._finish(calls, client)

    @careful
    def _open(self, run: "Run") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        client = MlflowClient(
            tracking_uri=self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _below(run.folder)
        )
        name = self.name or run.folder.name
        identity, continued = kept_id(run, "mlflow", lambda: self._create(client, name))
        if continued:
            client.update_run(identity, status="RUNNING")
            self._after = _last_step(client, identity)
        else:
            _log_parameters(client, identity, run.config)
            self._after = -1
        self._client, self._id, self._calls = client, identity, Background("twinkle-mlflow")

    def _create(self, client: Any, name: str) -> str:
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self.experiment)
        return str(client.create_run(experiment, run_name=name, tags=self.tags).info.run_id)

    @careful
    def _finish(self, calls: Background, client: Any) -> None:
        calls.add(lambda: client.set_terminated(self._id, self._status))
        calls.close(_CLOSING_SECONDS)
        if calls.error is not None:
            raise calls.error


def _below(folder: Path) -> str:
    if importlib.util.find_spec("sqlalchemy") and importlib.util.find_spec("alembic"):
        return f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # all that mlflow-skinny can write by itself
    return (folder.absolute() / "mlruns").as_uri()


def _log_parameters(client: Any, identity: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    parameters = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in flat(config)]
    for start in range(0, len(parameters), _PARAMETERS_A_CALL):
        client.log_batch(identity, params=parameters[start : start + _PARAMETERS_A_CALL])


def _last_step(client: Any, identity: str) -> int:
    """Return the last step of which a number is there; -1 where there is none."""
    steps = [
        metric.step
        for name in client.get_run(identity).data.metrics
        for metric in client.get_metric_history(identity, name)
    ]
    return max(steps, default=-1)

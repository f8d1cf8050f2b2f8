"""The tracker that records a run with MLflow."""

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_trackers.background import Background
from twinkle_trackers.service import ServiceTracker, check_text, flat, kept_id, numbers

if TYPE_CHECKING:
    from twinkle.run import Run

_LONGEST_PARAMETER = 500  # letters; servers before MLflow 2 refuse more
_PARAMETERS_A_CALL = 100
_CLOSING_SECONDS = 60.0


class MLflowTracker(ServiceTracker):
    """Records configuration, numbers and end of a run with `mlflow` (or `mlflow-skinny`).

    It records to `tracking_uri`, else to `MLFLOW_TRACKING_URI`, else below `run.folder`: to the database `mlflow.db`,
    or, where mlflow-skinny is installed alone, to the folder `mlruns`. Answers are waited for in a thread. A run that
    continues in its folder continues under the same id, kept in `mlflow.id`; steps that are there already stay as they
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
        super().__init__()
        check_text("MLflowTracker", "experiment", experiment)
        self.experiment, self.name, self.tracking_uri, self.tags = experiment, name, tracking_uri, dict(tags or {})

    def begin(self, run: "Run") -> "tuple[_Session, Background]":
        """Start or resume the run at the service, in a thread."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        place = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _below(run.folder)
        session = _Session(MlflowClient(tracking_uri=place), run, self.name or run.folder.name)
        calls = Background("twinkle-mlflow")
        calls.add(lambda: session.begin(self.experiment, self.tags))
        return session, calls

    def record(self, session: "tuple[_Session, Background]", step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of step `step`, when those before it are."""
        there, calls = session
        now, values = int(time.time() * 1000), numbers(metrics)
        if calls.error is not None:
            raise calls.error
        calls.add(lambda: there.log(step, now, values))

    def end(self, session: "tuple[_Session, Background]", error: BaseException | None) -> None:
        """Send what is left, and the end: finished, failed or (after an interrupt) killed."""
        there, calls = session
        status = "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"
        calls.add(lambda: there.end(status))
        calls.close(_CLOSING_SECONDS)
        if calls.error is not None:
            raise calls.error


class _Session:
    """A run of MLflow; every method waits for the response."""

    def __init__(self, client: Any, run: "Run", name: str) -> None:
        self._client, self._run, self._name = client, run, name
        self._id = ""
        self._after = -1

    def begin(self, experiment: str, tags: Mapping[str, str]) -> None:
        self._id, continued = kept_id(self._run, "mlflow", lambda: self._create(experiment, tags))
        if continued:
            self._client.update_run(self._id, status="RUNNING")
            self._after = self._last_step()
        else:
            self._log_configuration()

    def log(self, step: int, milliseconds: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if step > self._after:
            batch = [Metric(name, float(value), milliseconds, step) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=batch)

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, status)

    def _create(self, experiment: str, tags: Mapping[str, str]) -> str:
        existing = self._client.get_experiment_by_name(experiment)
        identity = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
        return str(self._client.create_run(identity, run_name=self._name, tags=dict(tags)).info.run_id)

    def _log_configuration(self) -> None:
        from mlflow.entities import Param

        values = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in flat(self._run.config)]
        for start in range(0, len(values), _PARAMETERS_A_CALL):
            self._client.log_batch(self._id, params=values[start : start + _PARAMETERS_A_CALL])

    def _last_step(self) -> int:
        """Return the last recorded step; -1 if there are none."""
        names = self._client.get_run(self._id).data.metrics
        steps = [metric.step for name in names for metric in self._client.get_metric_history(self._id, name)]
        return max(steps, default=-1)


def _below(folder: Path) -> str:
    if importlib.util.find_spec("sqlalchemy") and importlib.util.find_spec("alembic"):
        return f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # all that mlflow-skinny can write by itself
    return (folder.absolute() / "mlruns").as_uri()

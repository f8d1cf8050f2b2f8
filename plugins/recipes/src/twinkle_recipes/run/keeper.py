"""The steps of a run: the update, and its records: log, display, checkpoints, results and charts."""

import functools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from twinkle.errors import NonFiniteError
from twinkle.paths import write_text
from twinkle.run import Run
from twinkle_recipes.config import RunConfig
from twinkle_recipes.data import count_tokens
from twinkle_recipes.display import Display
from twinkle_recipes.history import Curve, is_due, losses_of, plain, readable, write_curve
from twinkle_recipes.run.checkpoints import Checkpoints, Resumed, score_of
from twinkle_recipes.run.stopping import StopRequest

Curves = Mapping[str, Curve]
"""The charts of a run, by file name."""


class Keeper:
    """Records the steps of a run; a context around its loop.

    Args:
        config: The configuration of the run.
        run: The run folder, trackers and hooks.
        show: The display.
        stop: Whether the user asked the run to end.
        resumed: The state that the run continues from.
        steps: Number of its last step.
        curves: Charts that are drawn when the loop ends, also after an exception.
        writes: Whether this process writes shared files.
        decides: The metric that determines the best checkpoint.
        highest: Whether its highest value is the best, instead of its lowest.

    Attributes:
        first: Number of the first remaining step.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        show: Display,
        stop: StopRequest,
        resumed: Resumed,
        steps: int,
        curves: Curves,
        *,
        writes: bool = True,
        decides: str = "eval/loss",
        highest: bool = False,
    ) -> None:
        self._config, self._run, self._show, self._stop = config, run, show, stop
        self._curves = curves if writes else {}
        self._decides, self._sign = decides, -1 if highest else 1
        self._history, self.first, self._steps = resumed.history, resumed.done + 1, steps
        self._checkpoints = Checkpoints(run.folder / "checkpoints", config.save_total_limit, writes=writes)
        self._checkpoints.best_score = score_of(self._history, self._checkpoints.path("best"), decides, highest=highest)

    def __enter__(self) -> "Keeper":
        self._show.__enter__()
        self._show.begin(self.first, self._steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show.__exit__(kind, error, trace)
        for name, curve in self._curves.items():
            write_curve(self._history, curve, self._run.folder / name, self._run.folder.name)

    def is_finished(self, *, complete: bool = True) -> bool:
        """Return whether a resumed run has no step left and its result is saved, and show that if so.

        Args:
            complete: Whether the folder also has the files that the recipe writes after the last step.
        """
        config, done = self._config, self.first - 1
        if config.run_folder is None or done < self._steps or not complete:
            return False
        if not (self._run.folder / result_name(config)).is_dir():
            return False
        self._show.say(f"all {self._steps} steps are done and the result is saved; nothing to do")
        return True

    def steps(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the number of each remaining step, with its batch."""
        return zip(range(self.first, self._steps + 1), batches, strict=False)

    def batches(self, training: Any) -> Iterator[tuple[int, Any]]:
        """Yield the number of each remaining step, with its batch; the loader is read epoch after epoch."""
        return self.steps(batch for _ in count() for batch in training)

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Log and show the initial evaluation, as step 0."""
        self._history.add(0, metrics)
        self._run.log(metrics, 0)
        self._show.say("before training: " + " ".join(f"{name}={value:.4f}" for name, value in metrics.items()))

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated on the held-out rows after this step."""
        return step == self._steps or is_due(step, self._config.eval_every)

    def keep(self, step: int, metrics: Mapping[str, float], model: Any, training: Any) -> None:
        """Log and show a step, and save a checkpoint if one is due; collective.

        Raises:
            KeyboardInterrupt: The user asked the run to stop; the checkpoint is saved.
        """
        self._history.add(step, metrics)
        self._run.log(metrics, step)
        self._show.step(step, metrics)
        score = self._sign * metrics[self._decides] if self._decides in metrics else None
        last, stopping = step == self._steps, self._stop.agreed()
        if last or stopping or is_due(step, self._config.save_every) or self._checkpoints.is_best(score):
            consumed = training.get_state()["consumed_train_samples"]
            write = functools.partial(
                model.save, save_optimizer=True, consumed_train_samples=consumed, loop_state={"step": step}
            )
            self._run.checkpoint_saved(self._checkpoints.save(step, score, write), step)
        if stopping and not last:
            raise KeyboardInterrupt

    def summary(self) -> dict[str, Any]:
        """Return the paths of the result, the best checkpoint and the charts, and the numbers of the last step."""
        folder, last = self._run.folder, self._history.last
        best = self._checkpoints.path("best")
        files = {"best": best} | {name: folder / name for name in self._curves}
        existing = {name: str(path) for name, path in files.items() if path is not None and path.exists()}
        held_out = {name: value for name, value in last.items() if name.startswith("eval/")}
        path = str(folder / result_name(self._config))
        return {"path": path, "steps": self._steps, **losses_of(last), **held_out, **existing}


def result_name(config: RunConfig) -> str:
    """Return the name of the folder with the trained weights."""
    return "adapter" if config.lora else "model"


@contextmanager
def keep_rows(folder: Path, rows: Any) -> Iterator[None]:
    """Write the rows of a pass whose loss is not finite to `nonfinite_batch.json`, and name the file in the error.

    Args:
        folder: The run folder.
        rows: The rows to write if the error itself has none.
    """
    try:
        yield
    except NonFiniteError as error:
        path = folder / "nonfinite_batch.json"
        write_text(path, json.dumps(error.inputs or rows, default=plain, ensure_ascii=False) + "\n")
        raise NonFiniteError(f"{error}; its rows are saved in {path}", error.inputs) from error


def update(
    model: Any, rows: Sequence[Any], config: RunConfig, folder: Path, started: float, **arguments: Any
) -> dict[str, float]:
    """Make one optimizer step from rows, and return its metrics.

    Args:
        model: The trained model.
        rows: Encoded rows.
        config: The configuration of the run.
        folder: The run folder; rows with a non-finite loss are saved there.
        started: `time.monotonic` at the beginning of the step, from which tokens per second are counted.
        **arguments: Arguments of `forward_backward`: the task, and arguments of the loss.

    Raises:
        NonFiniteError: The loss is NaN or infinite, and `on_nonfinite` is `raise`.
    """
    with keep_rows(folder, rows):
        model.forward_backward(inputs=rows, **config.in_memory, **arguments)
        model.clip_grad_and_step(max_grad_norm=config.max_grad_norm)
    return step_metrics(model, count_tokens(rows), started)


def step_metrics(model: Any, tokens: int, started: float) -> dict[str, float]:
    """Return the training metrics of the step that was just made, its tokens, and tokens per second."""
    metrics = {"loss": math.nan, **readable(model.calculate_metric(is_training=True))}  # no loss: the step was skipped
    return {**metrics, "tokens": tokens, "tokens_per_second": tokens / max(time.monotonic() - started, 1e-9)}


def evaluated(model: Any) -> dict[str, float]:
    """Return the metrics of all rows that were evaluated since the last call, each name under `eval/`."""
    metrics = readable(model.calculate_metric(is_training=False))
    return {f"eval/{name}": value for name, value in metrics.items() if name not in ("learning_rate", "grad_norm")}


def steps_of(config: RunConfig, epochs: int, batches: int) -> int:
    """Return the number of steps of a run with one step per batch, over all epochs, or `max_steps`."""
    return min(epochs * batches, config.max_steps or epochs * batches)

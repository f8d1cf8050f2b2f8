"""What each step of a run leaves: its line, what is shown, its checkpoint, and the pictures at the end."""

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from twinkle.run import Run
from twinkle_recipes.config.parts import RunConfig
from twinkle_recipes.rows.loading import count_tokens
from twinkle_recipes.run.checkpoints import Checkpoints
from twinkle_recipes.run.interrupt import StopRequest
from twinkle_recipes.run.keeping import keep_rows
from twinkle_recipes.run.results import is_finished, result_name
from twinkle_recipes.run.resuming import Resumed, score_of
from twinkle_recipes.show.numbers import is_due, losses_of, readable
from twinkle_recipes.show.plots import Curve, write_curve
from twinkle_recipes.show.progress import Display

Curves = Mapping[str, Curve]
"""What is drawn, by the name of the file."""


class Keeper:
    """Keeps the steps of a run in one process, as a context around its loop.

    Args:
        config: of the run.
        run: where it is written.
        show: what the user sees.
        stop: whether the user wants it to end.
        resumed: where it goes on.
        steps: number of its last step.
        curves: pictures that are drawn when the loop ends, however it ends.
        decides: the number that says which checkpoint is the best.
        highest: whether that is the one where it is highest, and not lowest.

    Attributes:
        first: number of the first step that is left.
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
        decides: str = "eval/loss",
        highest: bool = False,
    ) -> None:
        self._decides, self._sign = decides, -1 if highest else 1
        self._config, self._run, self._show, self._stop, self._curves = config, run, show, stop, curves
        self._history, self.first, self._steps = resumed.history, resumed.done + 1, steps
        self._checkpoints = Checkpoints(run.folder / "checkpoints", config.save_total_limit)
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

    def is_finished(self) -> bool:
        """Say whether all steps are made and the result is saved, and tell the user if so."""
        if not is_finished(self._config, self._run.folder, self.first - 1, self._steps):
            return False
        self._show.say(f"all {self._steps} steps are made and the result is saved; nothing is left to do")
        return True

    def batches(self, training: Any) -> Iterator[tuple[int, Any]]:
        """Yield the number of each step that is left, with its batch; epoch after epoch."""
        endless = (batch for _ in count() for batch in training)
        return zip(range(self.first, self._steps + 1), endless, strict=False)

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Log and show what was measured before the first step, as step 0."""
        self._history.add(0, metrics)
        self._run.log(metrics, 0)
        self._show.say("before training: " + " ".join(f"{name}={value:.4f}" for name, value in metrics.items()))

    def evaluates(self, step: int) -> bool:
        """Return whether the held-out rows are looked at after this step."""
        return step == self._steps or is_due(step, self._config.eval_every)

    def keep(self, step: int, metrics: Mapping[str, float], model: Any, training: Any) -> None:
        """Log and show a step, and save a checkpoint where one is due.

        Raises:
            KeyboardInterrupt: the user wants to stop, and the checkpoint stands.
        """
        self._history.add(step, metrics)
        self._run.log(metrics, step)
        self._show.step(step, metrics)
        score = self._sign * metrics[self._decides] if self._decides in metrics else None
        last, stopping = step == self._steps, self._stop.requested
        if last or stopping or is_due(step, self._config.save_every) or self._checkpoints.is_best(score):
            consumed = training.get_state()["consumed_train_samples"]
            write = functools.partial(
                model.save, save_optimizer=True, consumed_train_samples=consumed, loop_state={"step": step}
            )
            self._run.checkpoint_saved(self._checkpoints.save(step, score, write), step)
        if stopping and not last:
            raise KeyboardInterrupt

    def summary(self) -> dict[str, Any]:
        """Return where everything lies, and the loss and the held-out numbers of the last step."""
        folder, last = self._run.folder, self._history.last
        best = self._checkpoints.path("best")
        files = {"best": best} | {name: folder / name for name in self._curves}
        found = {name: str(path) for name, path in files.items() if path is not None and path.exists()}
        held_out = {name: value for name, value in last.items() if name.startswith("eval/")}
        path = str(folder / result_name(self._config))
        return {"path": path, "steps": self._steps, **losses_of(last), **held_out, **found}


def update(
    model: Any, rows: Sequence[Any], config: RunConfig, folder: Path, started: float, **arguments: Any
) -> dict[str, float]:
    """Make one optimizer step from some rows, and return its numbers.

    Args:
        model: is trained.
        rows: encoded.
        config: of the run.
        folder: of the run; rows whose loss is not finite are kept there.
        started: by `time.monotonic`, when the step began; tokens a second are counted from there.
        **arguments: of `forward_backward`: the task, and what the loss asks for.

    Raises:
        NonFiniteError: the loss is NaN or infinite, and `on_nonfinite` is `raise`.
    """
    with keep_rows(folder, rows):
        model.forward_backward(inputs=rows, **config.in_memory, **arguments)
        model.clip_grad_and_step(max_grad_norm=config.max_grad_norm)
    numbers = {"loss": math.nan, **readable(model.calculate_metric(is_training=True))}  # no loss: the step was skipped
    tokens = count_tokens(rows)
    return {**numbers, "tokens": tokens, "tokens_per_second": tokens / max(time.monotonic() - started, 1e-9)}


def evaluated(model: Any) -> dict[str, float]:
    """Return the numbers of all that was evaluated since the last call, each name under `eval/`."""
    numbers = readable(model.calculate_metric(is_training=False))
    return {f"eval/{name}": value for name, value in numbers.items() if name not in ("learning_rate", "grad_norm")}


def steps_of(config: RunConfig, epochs: int, batches: int) -> int:
    """Return the number of steps of a run that makes one of each batch, over all epochs, or `max_steps`."""
    return min(epochs * batches, config.max_steps or epochs * batches)

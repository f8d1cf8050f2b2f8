"""Passes and updates of many models together."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from twinkle.errors import NonFiniteError
from twinkle.model.pool import Operation, OperationError, OperationResult, Step
from twinkle_server.engine.backend import Cost, Fatal, Pass, UserError
from twinkle_server.engine.composition import Composition
from twinkle_server.engine.pool import custom, data
from twinkle_server.engine.pool.faults import check_device, told
from twinkle_server.engine.pool.lanes import Lanes
from twinkle_server.engine.pool.losses import Losses, ignores, takes
from twinkle_server.payloads import OptimStep
from twinkle_server.wire import codec


class Training:
    """Turns requests into operations of the pool, and their results into answers.

    Args:
        pool: the adapters.
        lanes: who has which.
        losses: what a request may name.
        context: tokens that a row may have.
        vocabulary: number of token ids.

    Attributes:
        custom: clients may send losses of their own.
        custom_seconds: that such a loss may take for one operation.
    """

    custom_seconds = custom.SECONDS
    custom = False

    def __init__(self, pool: Any, lanes: Lanes, losses: Losses, context: int, vocabulary: int) -> None:
        self._pool, self._lanes, self._losses = pool, lanes, losses
        self._context, self._vocabulary = context, vocabulary

    def run(self, passes: Sequence[Pass]) -> tuple[list[bytes | Exception], Cost]:
        """Do passes together; see `Backend.run`."""
        found: list[bytes | Exception] = [UserError("not done")] * len(passes)
        asked: list[tuple[int, Operation, data.Rows]] = []
        for index, item in enumerate(passes):
            try:
                asked.append((index, *self._read(item)))
            except Exception as error:  # a plugin's loss may raise anything, and the others go on
                found[index] = told(error)
        cost = Cost()
        if asked:
            results = self._run([operation for _, operation, _ in asked])
            compositions = {}
            for (index, _, rows), result in zip(asked, results, strict=True):
                found[index] = _answer(result, rows)
                if isinstance(result, OperationResult):
                    cost.tokens += result.usage.tokens
                    cost.padded += result.usage.padded
                    cost.flops += result.usage.flops
                    if result.composition:
                        compositions[index] = Composition(result.composition)
            cost.compositions = compositions
        return found, cost

    def interrupt(self, between: Callable[[], None]) -> None:
        """Call something between the pieces of a pass."""

        def guarded() -> None:
            try:
                between()
            except Exception as error:  # half of the pass is done
                raise error if isinstance(error, Fatal) else Fatal("sampling broke off a pass") from error

        self._pool.between = guarded

    def _run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """Run operations, each of which succeeds or fails whole.

        Raises:
            Fatal: something broke off after gradients had been added, so that nobody may try again here.
        """
        before = self._lanes.backwards()
        try:
            done: list[OperationResult | OperationError] = self._pool.run(operations)
        except Exception as error:
            check_device(error)
            if isinstance(error, Fatal) or self._lanes.backwards() == before:
                raise
            raise Fatal(f"a pass broke off: {type(error).__name__}") from error
        return done

    def _read(self, item: Pass) -> tuple[Operation, data.Rows]:
        lane = self._lanes[item.lane]
        request = data.read_request(item.payload)
        own = self.custom and request.loss_fn == custom.NAME
        spec = None if own else self._losses.find(request.loss_fn)
        rows = (
            data.read_rows(request, self._context, self._vocabulary, ())
            if spec is None
            else data.read_rows(
                request, self._context, self._vocabulary, takes(spec), ignores(spec), data.SEQUENCES in spec.inputs
            )
        )
        try:
            config = codec.loss_config(request)
        except ValueError as error:
            raise UserError(str(error)) from error
        if spec is None:
            loss: Any = custom.build(config, rows, self.custom_seconds)
        else:
            loss = self._losses.build(spec, config, rows, lane=item.lane, number=item.number)
        kind: Literal["forward", "forward_backward"] = "forward" if request.forward_only else "forward_backward"
        features: Any = rows.features
        again = None if item.composition is None else item.composition.passes
        return Operation(lane.ref, kind, features, loss, rows.inputs, number=item.number, composition=again), rows

    def step(self, steps: Sequence[tuple[str, OptimStep]]) -> list[Mapping[str, float] | Exception]:
        """Update models together; see `Backend.step`.

        Where a gradient's norm is not finite the weights stay, the gradient is gone, and the metric `skipped` is 1.
        """
        found: list[Mapping[str, float] | Exception] = [UserError("not done")] * len(steps)
        asked: list[tuple[int, Step]] = []
        for index, (lane, step) in enumerate(steps):
            try:
                asked.append((index, _step_of(self._lanes[lane].ref, step)))
            except UserError as error:
                found[index] = error
        try:
            results = self._pool.step([step for _, step in asked]) if asked else []
        except Exception as error:  # some may have been updated, and must not be again
            raise Fatal(f"a step broke off: {type(error).__name__}") from error
        for (index, _), result in zip(asked, results, strict=True):
            if isinstance(result, OperationError) and isinstance(result.error, NonFiniteError):
                found[index] = {"skipped": 1.0}  # no failure: it has an effect, and what failed is not replayed
            elif isinstance(result, OperationError):
                found[index] = told(result.error)
            else:
                found[index] = {"grad_norm": float(result.grad_norm)}
        return found


def _step_of(ref: Any, step: OptimStep) -> Step:
    checks = {
        "learning_rate": (step.learning_rate, 0.0, math.inf),
        "beta1": (step.beta1, 0.0, 1.0),
        "beta2": (step.beta2, 0.0, 1.0),
        "eps": (step.eps, 0.0, math.inf),
        "weight_decay": (step.weight_decay, 0.0, math.inf),
        "grad_clip_norm": (step.grad_clip_norm, 0.0, math.inf),
    }
    for name, (value, least, below) in checks.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value < below:
            limit = "a finite number of at least 0" if below == math.inf else "a number in [0, 1)"
            raise UserError(f"adam_params.{name} is {value!r}; it must be {limit}")
    options = {
        "lr": step.learning_rate, "betas": (step.beta1, step.beta2), "eps": step.eps,
        "weight_decay": step.weight_decay,
    }  # fmt: skip
    return Step(ref, step.grad_clip_norm, options, divide=False, zero_if_none=True)


def _answer(result: OperationResult | OperationError, rows: data.Rows) -> bytes | Exception:
    if isinstance(result, OperationError):
        return told(result.error)
    outputs = []
    for output, shape in zip(result.outputs, rows.shapes, strict=True):
        if "logps" not in output:
            return UserError("this loss scores no tokens, so that there are no logprobs; name another")
        outputs.append({"logprobs": output["logps"].float().cpu().numpy().reshape(shape)})
    metrics = dict(_metric(name, float(value), len(rows.shapes)) for name, value in result.metrics.items())
    metrics["loss:sum"] = float(result.loss_sum or 0.0)
    return codec.forward_backward_output(outputs, metrics)


def _metric(name: str, total: float, rows: int) -> tuple[str, float]:
    """Return a metric as the wire has it, from its sum over the rows; a client's own loss has named its metrics so."""
    if name.startswith("custom/"):
        return name, total / rows if name.endswith(":mean") else total
    return f"{_plain(name)}:sum", total


def _plain(name: str) -> str:
    """Return a metric's name without the colon that the wire cuts names at."""
    return name.replace(":", "_")

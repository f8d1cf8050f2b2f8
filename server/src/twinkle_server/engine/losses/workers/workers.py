"""`LossWorkers`: the worker processes for losses of plugins: started, limited, and replaced.

`WorkerLoss` is a loss whose value and gradients are computed in another process.
"""

import inspect
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import twinkle.errors
from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import CapacityError, NonFiniteError
from twinkle.loss import Loss
from twinkle_registry import CodeIdentity, ComponentSpec
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.identities import identity_or_none
from twinkle_server.engine.losses.workers import WorkerLimits
from twinkle_server.engine.losses.workers.calls import fields_of
from twinkle_server.engine.losses.workers.frames import TensorFrames
from twinkle_server.workers.child import Child, Ended, more_memory
from twinkle_server.workers.starting import start_first

_NOT_SENT: Final = ("logits", "embeddings", "aux_loss", "routed_experts")
"""Outputs that are not sent, because they are as large as the model's own tensors or not used by losses on labels."""
_SEED: Final = 1_000_003
_INSPECT: Final = {
    "POSITIONAL_ONLY": inspect.Parameter.POSITIONAL_ONLY,
    "POSITIONAL_OR_KEYWORD": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "VAR_POSITIONAL": inspect.Parameter.VAR_POSITIONAL,
    "KEYWORD_ONLY": inspect.Parameter.KEYWORD_ONLY,
    "VAR_KEYWORD": inspect.Parameter.VAR_KEYWORD,
}


class Remote(Protocol):
    """The loss of one operation in a worker process."""

    @property
    def code(self) -> CodeIdentity | None:
        """The code that the worker has imported; None before the first call."""

    def begin(self, request: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Send a call; return a function that waits for the response."""


class WorkerLoss(Loss):
    """A loss of one operation, computed by a loss worker.

    Args:
        remote: the worker's end.
        what: the loss and its plugin, for errors.
        description: name, parameters and attributes of the loss, as reported by the worker.
        number: number of the operation, the seed of random numbers of the loss.

    Raises:
        UserError: the loss requires full logits.
    """

    def __init__(self, remote: Remote, what: str, description: Mapping[str, Any], number: int) -> None:
        fields = dict(description)
        if fields.pop("require_logits"):
            raise UserError(
                f"{what} cannot be used by requests: it requires full logits (require_logits = True), which are too "
                "large to send to a worker process; rewrite it to use logps, entropies or uniform_logps"
            )
        self._remote, self._what, self._number, self._calls = remote, what, number, 0
        self.__name__ = str(fields.pop("name"))
        self.__signature__ = _signature(fields.pop("parameters"))
        for name, value in fields.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    @property
    def code(self) -> CodeIdentity | None:
        """The code that the worker of the latest call has imported."""
        return self._remote.code

    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch; see `Loss`."""
        return self.start(inputs, outputs, **kwargs)()  # type: ignore[return-value]  # the older form is valid, too

    def start(
        self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any
    ) -> Callable[[], LossOutput | Mapping[str, Any]]:
        """Send a micro-batch to the worker; see `Loss.start`."""
        self._calls += 1
        tensors = {
            name: value for name, value in outputs.items() if isinstance(value, Tensor) and name not in _NOT_SENT
        }
        differentiable = [name for name, value in tensors.items() if value.requires_grad]
        gradient = torch.is_grad_enabled() and bool(differentiable)
        answer = self._remote.begin(
            {
                "seed": self._number * _SEED + self._calls,
                "gradient": gradient,
                "threads": torch.get_num_threads(),
                "inputs": dict(inputs),
                "outputs": tensors,
                "differentiable": differentiable,
                "kwargs": kwargs,
            }
        )
        return lambda: self._finish(answer(), {name: tensors[name] for name in differentiable})

    def _finish(self, answer: dict[str, Any], outputs: Mapping[str, Tensor]) -> LossOutput | Mapping[str, Any]:
        if (key := answer.get("key")) in _NOT_SENT:
            raise UserError(f"{self._what} reads outputs[{key!r}], which is not sent to its worker process")
        if key is not None:
            raise KeyError(key)
        value, gradients = answer["loss_sum"], answer["gradients"]
        if not isinstance(value, Tensor) or not isinstance(gradients, dict | None):
            raise UserError(f"{self._what}: its worker process returned an invalid loss")
        if value.numel() == 1 and not math.isfinite(float(value)):
            raise NonFiniteError(f"{self._what} is {float(value)}")
        if gradients:
            value = self._attached(value, gradients, outputs)
        elif gradients is not None:
            value = _attach(value, [None] * len(outputs), *outputs.values())
        if answer.get("older"):
            return {"loss": value, "num_tokens": answer["num_tokens"]}
        return LossOutput(value, answer["denominator"], answer["metrics"])

    def _attached(self, value: Tensor, gradients: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the loss with the gradients of the worker attached."""
        grads: list[Tensor | None] = []
        for name, output in outputs.items():
            gradient = gradients.get(name)
            if gradient is not None:
                if not isinstance(gradient, Tensor) or gradient.shape != output.shape:
                    raise UserError(f"{self._what}: its worker process returned an invalid gradient")
                if not bool(torch.isfinite(gradient).all()):
                    raise NonFiniteError(f"the gradient of {self._what} is not finite")
                gradient = gradient.to(output.device)
            grads.append(gradient)
        first = next(iter(outputs.values()))
        attached: Tensor = _attach(value.to(first.device), grads, *outputs.values())
        return attached


class _Attached(torch.autograd.Function):
    """A scalar with known gradients with respect to tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if grad is None else grad_output.to(grad.dtype) * grad for grad in ctx.gradients))


_attach: Any = _Attached.apply


def _signature(parameters: Sequence[Sequence[Any]]) -> inspect.Signature:
    """Return the signature of a loss; optional arguments get None as default."""
    arguments = []
    for name, kind, required in parameters:
        default = inspect.Parameter.empty if required else None
        arguments.append(inspect.Parameter(name, _INSPECT[kind], default=default))
    return inspect.Signature(arguments)


_log = logging.getLogger(__name__)
_MODULE: Final = "twinkle_server.engine.losses.workers.process"
_PAUSE: Final = 30.0
"""Seconds until the failed import of a plugin is retried."""
_CLIENTS: Final = (
    "ArgumentError",
    "DataError",
    "Unsupported",
    "ComponentTypeError",
    "TrainingStateError",
    "NonFiniteError",
)
_SIGKILL: Final = "was killed by SIGKILL"


@dataclass(slots=True, eq=False)
class _Plugin:
    """A plugin, and the process that has imported it, from which its workers are forked."""

    spec: ComponentSpec
    """One of its losses."""
    specs: list[ComponentSpec] = field(default_factory=list)
    process: Child | None = None
    until: float = 0.0
    """Deadline of its import."""
    loaded: bool = False
    failure: str = ""
    again: float = 0.0
    """Time at which a failed import may be retried."""
    code: CodeIdentity | None = None
    """What the process imports: the files are read just before."""

    @property
    def name(self) -> str:
        """Name of the plugin."""
        return self.spec.dist


@dataclass(slots=True, eq=False)
class _Worker:
    """The worker of one queue and plugin; `call` is the number of its current call, `code` what it has imported."""

    process: Child
    code: CodeIdentity | None
    call: int | None = None


@dataclass(slots=True, eq=False)
class _Tree:
    """All worker processes."""

    first: Child | None = None
    plugins: dict[str, _Plugin] = field(default_factory=dict)
    workers: dict[tuple[str, str], _Worker] = field(default_factory=dict)

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.process.end()
        self.workers.clear()
        for plugin in self.plugins.values():
            if plugin.process is not None:
                plugin.process.end()
        if self.first is not None:
            self.first.end()


class LossWorkers:
    """Computes losses of plugins in worker processes, one for each model and plugin.

    Args:
        limits: of a call, and of a worker.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self._tree = _Tree()
        self._calls = itertools.count(1)
        self._close = weakref.finalize(self, self._tree.close)

    def prepare(self, specs: Sequence[ComponentSpec]) -> None:
        """Start importing the plugins of these losses, without waiting."""
        for spec in specs:
            self._plugin(spec).specs.append(spec)
        for plugin in self._tree.plugins.values():
            try:
                self._launch(plugin)
            except (Ended, OSError) as error:
                self._failed(plugin, str(error))

    def close(self) -> None:
        """End all processes."""
        self._close()

    def forget(self, queue_id: str) -> None:
        """End the workers of a removed model."""
        for key in [key for key in self._tree.workers if key[0] == queue_id]:
            self._tree.workers.pop(key).process.end()

    def keep(self, names: Collection[str]) -> None:
        """End the processes of all plugins except some.

        Args:
            names: of the plugins to keep.
        """
        for key in [key for key in self._tree.workers if key[1] not in names]:
            self._tree.workers.pop(key).process.end()
        for name in [name for name in self._tree.plugins if name not in names]:
            self._drop(self._tree.plugins.pop(name))

    def open(
        self, spec: ComponentSpec, config: Mapping[str, Any], *, queue_id: str, number: int, weighted: bool
    ) -> WorkerLoss:
        """Return the loss of an operation, built by the worker of its model.

        Args:
            spec: the loss.
            config: its options.
            queue_id: the model.
            number: number of the operation.
            weighted: whether the rows have weights other than 0 and 1, which the loss must read.

        Raises:
            UserError: an option is invalid, or the worker failed.
        """
        how = {"operation": next(self._calls), "spec": fields_of(spec), "config": dict(config), "weighted": weighted}
        remote = _Remote(self, spec, queue_id, how)
        description = remote.begin({}, do="open")()
        return WorkerLoss(remote, what_of(spec), description, number)

    def worker(self, spec: ComponentSpec, queue_id: str) -> _Worker:
        """Return the worker of a model and plugin; fork it if there is none.

        Raises:
            UserError: the plugin cannot be imported.
            Ended: the worker cannot be forked.
        """
        key = (queue_id, spec.dist)
        worker = self.find(spec, queue_id)
        self._tree.workers.pop(key, None)
        if worker is None:
            plugin = self._plugin(spec)
            worker = _Worker(self._forked(plugin), plugin.code)
        self._tree.workers[key] = worker  # ordered by last use
        idle = [key for key, other in self._tree.workers.items() if other.call is None and other is not worker]
        for old in idle[: max(0, len(self._tree.workers) - self.limits.warm)]:
            self._tree.workers.pop(old).process.end()
        return worker

    def find(self, spec: ComponentSpec, queue_id: str) -> _Worker | None:
        """Return the running worker of a model and plugin, if there is one."""
        worker = self._tree.workers.get((queue_id, spec.dist))
        if worker is not None and worker.call is None and worker.process.lost:
            worker.process.end()  # it ended while idle
        return None if worker is None or worker.process.ended else worker

    def number(self) -> int:
        """Return a new call number."""
        return next(self._calls)

    def _plugin(self, spec: ComponentSpec) -> _Plugin:
        return self._tree.plugins.setdefault(spec.dist, _Plugin(spec))

    def _forked(self, plugin: _Plugin) -> Child:
        for _ in range(2):
            process = self._loaded(plugin)
            until = time.monotonic() + self.limits.seconds
            try:
                worker = Child.fork(process, self.limits.memory, until)
                worker.settle(until)
            except Ended as error:
                if error.slow:
                    raise
                self._drop(plugin)
                continue
            return worker
        raise Ended("could not be started")

    def _loaded(self, plugin: _Plugin) -> Child:
        """Return the process that has imported a plugin.

        Raises:
            UserError: the import failed, or is being retried.
        """
        again = bool(plugin.failure)
        if again and time.monotonic() < plugin.again:
            raise _passing(f"{plugin.failure}; it is loaded again in {plugin.again - time.monotonic():.0f} s")
        try:
            process = plugin.process
            if process is None or process.ended:
                process = self._launch(plugin)
            if not plugin.loaded:
                if again and not process.ready and time.monotonic() < plugin.until:
                    raise _passing(f"{plugin.failure}; it is being loaded again, try again in some seconds")
                process.settle(plugin.until)
                process.receive(plugin.until, lambda frame: frame.get("id") == 0)
                plugin.loaded, plugin.failure = True, ""
        except Ended as error:
            end = self._drop(plugin)
            if error.slow:
                reason = f"took longer than {self.limits.start:g} s"
            else:
                reason = end if str(error) == "has ended" else str(error)
            self._failed(plugin, reason)
            raise _passing(plugin.failure)  # noqa: B904  # it has its own cause
        return process

    def _failed(self, plugin: _Plugin, reason: str) -> None:
        plugin.failure = f"the plugin {plugin.name!r} cannot be loaded: its worker process {reason}"
        plugin.again = time.monotonic() + _PAUSE
        _log.error("%s", plugin.failure)

    def _drop(self, plugin: _Plugin) -> str:
        process, plugin.process, plugin.loaded = plugin.process, None, False
        return "has ended" if process is None else process.end()

    def _launch(self, plugin: _Plugin) -> Child:
        """Fork a process and make it import a plugin; its response is awaited where it is needed."""
        plugin.until = time.monotonic() + self.limits.start
        plugin.loaded = False
        first = self._tree.first
        if first is None or first.ended:
            first = self._tree.first = _first()
        try:
            process = Child.fork(first, self.limits.memory, plugin.until)
        except Ended:
            first.end()
            first = self._tree.first = _first()
            process = Child.fork(first, self.limits.memory, plugin.until)
        plugin.process, plugin.code = process, identity_or_none(plugin.spec)
        process.send({"do": "load", "id": 0, "specs": [fields_of(spec) for spec in plugin.specs]}, plugin.until)
        return process


class _Remote:
    """The loss of one operation in the worker of its model."""

    def __init__(self, workers: LossWorkers, spec: ComponentSpec, queue_id: str, how: Mapping[str, Any]) -> None:
        self._workers, self._spec, self._queue, self._how = workers, spec, queue_id, how
        self._left = workers.limits.seconds
        self.code: CodeIdentity | None = None

    def begin(self, request: Mapping[str, Any], do: str = "call") -> Callable[[], dict[str, Any]]:
        """Send a call unless the worker is busy; return a function that waits for the response."""
        number = self._workers.number()
        frame = {"do": do, "id": number, **self._how, **request}
        sent = None if self._busy() else self._send(frame)
        return lambda: self._receive(number, *(sent or self._send(frame)))

    def _busy(self) -> bool:
        worker = self._workers.find(self._spec, self._queue)
        return worker is not None and worker.call is not None

    def _send(self, frame: Mapping[str, Any]) -> tuple[_Worker, float]:
        """Send a call, and return its worker and its deadline."""
        worker: _Worker | None = None
        try:
            worker = self._workers.worker(self._spec, self._queue)  # importing a plugin has its own limit
            until = time.monotonic() + self._left
            worker.process.send(frame, until)
            worker.call, self.code = frame["id"], worker.code
        except Ended as error:
            raise self._failure(error, worker)  # noqa: B904  # it has its own cause
        except OSError as error:  # out of descriptors, processes or memory
            raise self._error(f"could not be started: {error.strerror}", passing=True)  # noqa: B904
        return worker, until

    def _receive(self, number: int, worker: _Worker, until: float) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            answer = worker.process.receive(until, lambda frame: frame.get("id") == number)
        except Ended as error:
            raise self._failure(error, worker)  # noqa: B904  # it has its own cause
        finally:
            self._left = max(0.0, self._left - (time.monotonic() - begin))
            if worker.call == number:
                worker.call = None
        if "error" in answer:
            return self._raised(answer["error"], worker)
        return answer

    def _failure(self, error: Ended, worker: _Worker | None) -> UserError:
        """End a worker, and return the error for the client."""
        end = "has ended" if worker is None else worker.process.end()
        reason = str(error)
        passing = error.slow or worker is None or reason == more_memory(self._workers.limits.memory)
        if error.slow:
            reason = f"took longer than {self._workers.limits.seconds:g} s, the limit of this service"
        elif reason == "has ended":
            reason = f"crashed: its process {end}"
            if end == _SIGKILL:
                reason, passing = f"{reason} (by itself, or by the system because memory ran out)", True
        return self._error(reason, passing)

    def _error(self, reason: str, passing: bool = False) -> UserError:
        text = f"{what_of(self._spec)} {reason}; this operation had no effect, and the weights are unchanged"
        _log.warning("%s", text)
        return _passing(text) if passing else UserError(text)

    def _raised(self, error: Any, worker: _Worker) -> dict[str, Any]:
        """Raise the error of a loss; a missing key of the outputs is returned instead, for a better message."""
        if not isinstance(error, dict):
            raise self._error("returned an invalid loss")
        kind, text = str(error.get("type")), str(error.get("text"))
        if error.get("memory"):
            worker.process.end()  # its memory may never be freed
            raise self._error(more_memory(self._workers.limits.memory), passing=True)
        if error.get("own"):
            if kind in _CLIENTS:
                raise getattr(twinkle.errors, kind)(text)
            if kind == "UserError":
                raise UserError(text)
        _log.warning("%s raised:\n%s", what_of(self._spec), error.get("log"))
        if isinstance(error.get("key"), str):
            return {"key": error["key"]}
        raise self._error(f"raised {kind}: {text}" if text else f"raised {kind}")


def _passing(text: str) -> UserError:
    """Return a temporary error: a replay may be retried, since the operation succeeded before."""
    error = UserError(text)
    error.__cause__ = CapacityError(text)
    return error


def what_of(spec: ComponentSpec) -> str:
    """Return the description of a loss for errors."""
    return f"loss_fn {spec.name!r} of plugin {spec.dist!r}"


def _first() -> Child:
    """Start the process from which all others are forked."""
    return start_first(_MODULE, TensorFrames())

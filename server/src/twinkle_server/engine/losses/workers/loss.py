"""`WorkerLoss`: a loss as the pool sees it, whose value and gradients another process computes."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import NonFiniteError
from twinkle.loss import Loss
from twinkle_server.engine.errors import UserError

_NOT_SENT: Final = ("logits", "embeddings", "aux_loss", "routed_experts")
"""Outputs that are as large as the model's own tensors, or none of a loss on labels."""
_SEED: Final = 1_000_003
_INSPECT: Final = {
    "POSITIONAL_ONLY": inspect.Parameter.POSITIONAL_ONLY,
    "POSITIONAL_OR_KEYWORD": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "VAR_POSITIONAL": inspect.Parameter.VAR_POSITIONAL,
    "KEYWORD_ONLY": inspect.Parameter.KEYWORD_ONLY,
    "VAR_KEYWORD": inspect.Parameter.VAR_KEYWORD,
}


class Remote(Protocol):
    """The loss of one operation, in its process."""

    def begin(self, request: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Send a call, and return a function that waits for its answer."""


class WorkerLoss(Loss):
    """A loss of one operation, computed by a loss worker.

    Args:
        remote: the worker's end.
        what: the loss and its plugin, for errors.
        description: what the worker says of the loss: its name, its parameters, and the attributes of `Loss`.
        number: of the operation; random numbers that the loss draws follow from it.

    Raises:
        UserError: the loss asks for whole logits.
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

    def __call__(self, inputs: InputBatch, outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """Compute the loss of one micro-batch; see `Loss`."""
        return self.start(inputs, outputs, **kwargs)()  # type: ignore[return-value]  # the older form is read too

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
        """Return the loss with the worker's gradients behind it."""
        found: list[Tensor | None] = []
        for name, output in outputs.items():
            gradient = gradients.get(name)
            if gradient is not None:
                if not isinstance(gradient, Tensor) or gradient.shape != output.shape:
                    raise UserError(f"{self._what}: its worker process returned an invalid gradient")
                if not bool(torch.isfinite(gradient).all()):
                    raise NonFiniteError(f"the gradient of {self._what} is not finite")
                gradient = gradient.to(output.device)
            found.append(gradient)
        first = next(iter(outputs.values()))
        attached: Tensor = _attach(value.to(first.device), found, *outputs.values())
        return attached


class _Attached(torch.autograd.Function):
    """A number with known gradients with respect to tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if one is None else above.to(one.dtype) * one for one in ctx.gradients))


_attach: Any = _Attached.apply


def _signature(parameters: Sequence[Sequence[Any]]) -> inspect.Signature:
    """Return the signature of a loss; arguments with defaults have some default."""
    found = []
    for name, kind, required in parameters:
        default = inspect.Parameter.empty if required else None
        found.append(inspect.Parameter(name, _INSPECT[kind], default=default))
    return inspect.Signature(found)

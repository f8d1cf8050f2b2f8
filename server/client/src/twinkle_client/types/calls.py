"""The arguments of the methods of a native model."""

from typing import Annotated, Any, Literal

from pydantic import Field

from twinkle_client.types.base import Name, Plain, Request

Accumulation = Annotated[int, Field(ge=1, le=2**20)] | None
Task = Literal["causal_lm", "embedding"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Arguments(Request):
    """Arguments of a method."""


class Nothing(Arguments):
    """A method without arguments."""


class SetComponent(Arguments):
    """`set_loss`, `set_optimizer`, `set_lr_scheduler`, `set_template`, `set_processor`, `apply_patch`.

    Attributes:
        name: of a component that is installed on the service.
        options: of its constructor.
    """

    name: Name
    options: Plain = Field(default_factory=dict)


class AddMetric(SetComponent):
    """`add_metric`; `is_training=None` adds the metric to training and evaluation."""

    is_training: bool | None = None


class _Rows(Arguments):
    inputs: Any
    temperature: Positive = 1.0
    return_logits: bool = False
    task: Task = "causal_lm"


class Forward(_Rows):
    """`forward`. A row is encoded (`input_ids`, ...) or a conversation (`messages`, ...)."""


class ForwardOnly(_Rows):
    """`forward_only`.

    Attributes:
        disable_lora: use the base model alone.
        topk_logprobs: number of most probable tokens to return at each trained position.
        rows_apart: return each output as a list with an array for each row, instead of one padded array.
    """

    disable_lora: bool = False
    topk_logprobs: Annotated[int, Field(ge=1, le=1024)] | None = None
    rows_apart: bool = False


class GivenLoss(Request):
    """A loss that the client has computed from log-probabilities.

    Attributes:
        value: of the loss.
        denominator: what it is divided by at the step, with those of other backward calls.
    """

    value: Annotated[float, Field(allow_inf_nan=False)]
    denominator: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class ForwardBackward(_Rows):
    """`forward_backward`.

    Attributes:
        loss_inputs: arguments of the loss.
        given_loss: a loss of the client in place of the model's; `loss_scale` of each row is its gradient with respect
            to the log-probabilities of the labels.
    """

    loss_inputs: Plain = Field(default_factory=dict)
    given_loss: GivenLoss | None = None


class CalculateLoss(Arguments):
    """`calculate_loss`; `loss_inputs` are the arguments of the loss."""

    loss_inputs: Plain = Field(default_factory=dict)


class Backward(Nothing):
    """`backward`."""


class _Due(Arguments):
    gradient_accumulation_steps: Accumulation = None
    flush: bool = False


class ClipGradNorm(_Due):
    """`clip_grad_norm`."""

    max_grad_norm: float = 1.0
    norm_type: Positive | Literal["inf"] = 2.0


class ClipGradAndStep(ClipGradNorm):
    """`clip_grad_and_step`."""


class OptimizerStep(_Due):
    """`step`; `optim_params` are `lr`, `weight_decay`, `betas` and `eps`, for this step and later ones."""

    optim_params: Plain | None = None


class ZeroGrad(_Due):
    """`zero_grad`."""

    set_to_none: bool = True


class LrStep(_Due):
    """`lr_step`; `metrics` is for schedulers that watch a number."""

    metrics: float | None = None


class CalculateMetric(Arguments):
    """`calculate_metric`."""

    is_training: bool = True

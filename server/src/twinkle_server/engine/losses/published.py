"""Forms of Tinker requests that scripts for Twinkle's published service use, beside Tinker's own.

`disable_lora` computes a forward on the base model, and `importance_sampling` on rows with `ref_logps` is `DPOLoss`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from twinkle_server.engine.errors import UserError
from twinkle_server.wire import tinker_pb2 as pb

DISABLE: Final = "disable_lora"
REFERENCE: Final = "ref_logps"
_POLICY, _PREFERENCE = "importance_sampling", "DPOLoss"
_OPTIONS: Final[Mapping[str, str]] = {
    "dpo_beta": "beta", "dpo_loss_type": "loss_type", "dpo_sft_weight": "sft_weight",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossCall:
    """What a request asks for.

    Attributes:
        loss: name of the loss.
        options: of the loss.
        adapted: whether the model's adapter is used; False is the base model alone.
        ignored: inputs of the rows that the loss does not read.
    """

    loss: str
    options: Mapping[str, float | str]
    adapted: bool = True
    ignored: tuple[str, ...] = ()


def read_call(request: pb.ForwardBackwardRequest, config: Mapping[str, float | str], *, strict: bool) -> LossCall:
    """Return the loss of a request, its options, and whether it uses the adapter.

    Args:
        request: the request.
        config: its `loss_fn_config`.
        strict: whether names of published losses mean Tinker's formulas only.

    Raises:
        UserError: `disable_lora` is not 0 or 1, or the request would train without an adapter.
    """
    options = dict(config)
    disabled: Any = options.pop(DISABLE, 0)
    if disabled not in (0, 1):
        raise UserError(f"loss_fn_config: {DISABLE} must be True or False, got {disabled!r}")
    if disabled and not request.forward_only:
        raise UserError(
            f"loss_fn_config: {DISABLE} is for forward: without the adapter, forward_backward has nothing to train"
        )
    adapted = not disabled
    paired = bool(request.data) and REFERENCE in request.data[0].loss_fn_inputs
    if strict or request.loss_fn != _POLICY or not paired:
        return LossCall(request.loss_fn, options, adapted)
    renamed = {_OPTIONS.get(name, name): value for name, value in options.items()}
    return LossCall(_PREFERENCE, renamed, adapted, ("logprobs", "advantages"))

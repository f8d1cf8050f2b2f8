"""What patches of Hugging Face models need to know of the model that they are given."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.errors import PatchError


def hugging_face(module: Any, patch: object) -> Any:
    """Return the transformers model that `module` is, or that PEFT or DistributedDataParallel wraps.

    Raises:
        PatchError: `module` is neither.
    """
    from torch.nn.parallel import DistributedDataParallel
    from transformers import PreTrainedModel

    model = module.module if isinstance(module, DistributedDataParallel) else module
    model = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    if not isinstance(model, PreTrainedModel):
        raise PatchError(
            f"{type(patch).__name__} is for transformers models, and this is a {type(module).__module__}."
            f"{type(module).__qualname__}; give the Hugging Face module"
        )
    return model


def check_whole(model: Any, patch: object) -> None:
    """Refuse a model whose parameters lie in shards on several ranks: it is too late for what the patch does.

    Raises:
        PatchError: it is sharded by FSDP2 or tensor parallelism.
    """
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PatchError(
            f"{type(patch).__name__}: {type(model).__name__} is sharded already; apply the patch before that, in "
            "TransformersModel before the first step"
        )


def model_of(forward: Callable[..., Any]) -> Any:
    """Return the model whose bound method `forward` is: that of a deep copy, where the model was copied.

    Raises:
        PatchError: it is no method, because something else has wrapped it.
    """
    owner = getattr(forward, "__self__", None)
    if owner is None:
        raise PatchError(
            f"forward is wrapped by something else already ({type(forward).__name__}); apply the patch before that"
        )
    return owner


def arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call of `forward` was given, by name."""
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)

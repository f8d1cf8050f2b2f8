"""A frozen linear layer with one LoRA adapter as a single node of the graph, instead of PEFT's six.

Fewer nodes mean fewer intermediate tensors and less overhead in each layer. Layers keep PEFT's parameters, names and
methods; calls with merged, disabled or several adapters, hooks or arguments use PEFT's own forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from twinkle_transformers.sites import is_at_rest

_Term = tuple[Tensor, Tensor | None, Tensor, Tensor, float, Callable[[Tensor], Tensor] | None, bool]
_DROPOUTS = (nn.Identity, nn.Dropout)
_PLAIN = (Tensor, nn.Parameter)
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def fuse_layers(model: nn.Module) -> None:
    """Make PEFT's linear layers of a model compute in one node whenever a call allows it.

    Args:
        model: a model with PEFT's layers; layers that were installed before are not changed.
    """
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = Linear


class Linear(lora.Linear):  # type: ignore[misc]  # peft has no types
    """PEFT's layer with a faster forward. It keeps the name, because callers compare class names."""

    stands_for = lora.Linear
    """The class that it replaces, for callers that compare classes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `[..., fan_out]` for `[..., fan_in]`, as PEFT does."""
        term = None if args or kwargs else _plain_term(self, x)
        if term is None:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        return lora_linear(x, *term)


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    dropout: Callable[[Tensor], Tensor] | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return `x W^T + b + scale * (dropout(x) A^T) B^T`; under autocast all in its dtype.

    Args:
        x: `[..., fan_in]`.
        weight: W, `[fan_out, fan_in]`, frozen.
        bias: b, `[fan_out]`, frozen.
        down: A, `[r, fan_in]`.
        up: B, `[fan_out, r]`.
        scale: `alpha / r`, or PEFT's variant of it.
        dropout: keeps shape and dtype.
        transposed: W is `[fan_in, fan_out]` (GPT-2).
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if transposed:
        weight = weight.t()
    into = None if dropout is None else dropout(x)
    if torch.is_grad_enabled():
        y: Tensor = _Adapted.apply(x, into, weight, bias, down, up, scale)  # type: ignore[no-untyped-call]
        return y
    return _forward(x, into, weight, bias, down, up, scale)[0]


def _forward(
    x: Tensor, into: Tensor | None, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if down.dtype != x.dtype or up.dtype != x.dtype:
        down, up = down.to(x.dtype), up.to(x.dtype)
    rows = _rows(x)
    y = nn.functional.linear(rows, weight, bias)
    hidden = nn.functional.linear(rows if into is None else _rows(into), down).mul_(scale)
    y.addmm_(
        hidden, up.t()
    )  # `scale` was applied to the narrow `hidden`: a factor in a half-precision product is slower
    return y.view(*x.shape[:-1], y.shape[-1]), hidden


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Adapted(torch.autograd.Function):
    """For rows x, after dropout z, with gradient g: dx = g W, dz = s (g B) A, dA = s (g B)^T z, dB = g^T (s z A^T).

    It saves z and s z A^T beside the matrices. Without dropout z is x, and gets the sum of both gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, into: Tensor | None, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        y, hidden = _forward(x, into, weight, bias, down, up, scale)
        ctx.save_for_backward(x if into is None else into, hidden, weight, down, up)
        ctx.scale, ctx.drops = scale, into is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, hidden, weight, wide_down, wide_up = ctx.saved_tensors
        scale, down, up = ctx.scale, wide_down, wide_up
        if down.dtype != z.dtype or up.dtype != z.dtype:
            down, up = down.to(z.dtype), up.to(z.dtype)
        rows, g = _rows(z), _rows(grads[0])
        if torch.is_grad_enabled():  # for a second derivative: the saved tensor has no graph
            hidden = rows @ down.t() * scale
        inner = (g @ up).mul_(scale)
        dx = dz = ddown = dup = None
        if ctx.needs_input_grad[0]:
            dx = g @ weight
        if ctx.needs_input_grad[1]:
            dz = (inner @ down).view(z.shape)
        elif dx is not None and not ctx.drops:
            dx.addmm_(inner, down)
        if ctx.needs_input_grad[4]:
            ddown = (inner.t() @ rows).to(wide_down.dtype)
        if ctx.needs_input_grad[5]:
            dup = (g.t() @ hidden).to(wide_up.dtype)
        return None if dx is None else dx.view(z.shape), dz, None, None, ddown, dup, None


def _plain_term(layer: Any, x: Tensor) -> _Term | None:
    """Return the other arguments of `lora_linear` if PEFT's forward would compute the same now, else None.

    It runs at every call, and reads `_modules` directly: attribute access of a module costs as much as a small product.
    """
    name = layer._active_adapter
    if type(name) is not str:
        if len(name) != 1:
            return None
        name = name[0]
    if layer._disable_adapters or layer.merged_adapters or name in layer.lora_variant:
        return None
    parts = layer._modules
    base, down, up = parts["base_layer"], parts["lora_A"]._modules.get(name), parts["lora_B"]._modules.get(name)
    if down is None or not (_is_product(down) and _is_product(up)) or _has_hooks(base) or not is_at_rest(base):
        return None
    kind, dropout = type(base), parts["lora_dropout"]._modules[name]
    if (kind is not nn.Linear and kind is not Conv1D) or type(dropout) not in _DROPOUTS:
        return None  # quantized, or another adapter inside
    weight, bias, a, b = base._parameters["weight"], base._parameters["bias"], down.weight, up.weight
    if weight.requires_grad or up.bias is not None or (bias is not None and bias.requires_grad):
        return None
    if type(x) is not Tensor or type(weight) not in _PLAIN or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return None  # distributed
    if not _meet(x, weight, a, b) or torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return None  # the node has no functorch rules; compilers fuse by themselves, and cannot trace it
    return weight, bias, a, b, layer.scaling[name], dropout if _acts(dropout) else None, kind is Conv1D


def _is_product(module: nn.Module) -> bool:
    """Return whether a call of the module computes only its product."""
    return type(module) is nn.Linear and "forward" not in module.__dict__ and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _acts(dropout: Any) -> bool:
    return (dropout.training and getattr(dropout, "p", 0)) or _has_hooks(dropout)


def _meet(x: Tensor, *others: Tensor) -> bool:
    """Return whether all have one dtype, or get it by autocast, which does not convert float64."""
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype in _CAST and all(other.dtype in _CAST for other in others)
    return all(other.dtype == x.dtype for other in others)

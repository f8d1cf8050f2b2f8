"""The gated MLP of Llama and its like, which stores one tensor less for the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_SILU = ("SiLU", "SiLUActivation")
_GELU_TANH = ("GELUTanh", "PytorchGELUTanh")


class GatedMLPKernel(nn.Module):
    """`down(act(gate(x)) * up(x))` with SiLU or GELU (tanh): SwiGLU and GeGLU of Shazeer 2020, arXiv:2002.05202.

    Autograd of the layer's own forward keeps `gate`, `act(gate)` and `up`; this keeps `gate` and `up` and computes the
    rest again. With another activation it does what the layer does. The layer has `gate_proj`, `up_proj`, `down_proj`
    and `act_fn`.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output.

        Args:
            x: `[..., H]`, any floating dtype.
        """
        gate, up, name = self.gate_proj(x), self.up_proj(x), type(self.act_fn).__name__
        if name not in (*_SILU, *_GELU_TANH) or gate.dtype != up.dtype:
            product = self.act_fn(gate) * up
        else:
            product = _Gated.apply(gate, up, name in _SILU)  # type: ignore[no-untyped-call]
        result: Tensor = self.down_proj(product)
        return result


class _Gated(torch.autograd.Function):
    """`act(gate) * up`; d/dup = act(gate), d/dgate = up act'(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_silu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.is_silu = is_silu
        return _act(gate, is_silu).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        by_gate, by_up = None, None
        if ctx.needs_input_grad[1]:
            by_up = _act(gate, ctx.is_silu).mul_(grads[0])
        if ctx.needs_input_grad[0]:
            by_act = grads[0] * up
            if ctx.is_silu:
                by_gate = torch.ops.aten.silu_backward(by_act, gate)
            else:
                by_gate = torch.ops.aten.gelu_backward(by_act, gate, approximate="tanh")
        return by_gate, by_up, None


def _act(gate: Tensor, is_silu: bool) -> Tensor:
    return functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")

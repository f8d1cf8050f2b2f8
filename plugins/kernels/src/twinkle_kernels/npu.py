"""Kernels of torch-npu for transformers' layers on Ascend devices; not tested on such a device yet."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from twinkle_kernels.mlp import _SILU


class NpuRMSNorm(nn.Module):
    """`weight * normed`; for layers with `weight` and `variance_epsilon`, as `RMSNormKernel`."""

    devices: ClassVar[tuple[str, ...]] = ("npu",)
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normed states; `hidden_states` is `[..., H]`."""
        import torch_npu

        result: Tensor = torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=self.variance_epsilon)[0]
        return result


class NpuShiftedRMSNorm(nn.Module):
    """`(1 + weight) * normed`; for layers with `weight` and `eps`, as `ShiftedRMSNormKernel`."""

    devices: ClassVar[tuple[str, ...]] = ("npu",)
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed states; `x` is `[..., H]`."""
        import torch_npu

        result: Tensor = torch_npu.npu_rms_norm(x.float(), 1.0 + self.weight.float(), epsilon=self.eps)[0]
        return result.to(x.dtype)


class NpuGatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; with another activation as the layer does."""

    devices: ClassVar[tuple[str, ...]] = ("npu",)
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output; `x` is `[..., H]`."""
        import torch_npu

        gate, up = self.gate_proj(x), self.up_proj(x)
        if type(self.act_fn).__name__ in _SILU:
            product = torch_npu.npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)
        else:
            product = self.act_fn(gate) * up
        result: Tensor = self.down_proj(product)
        return result


class NpuRotary:
    """`apply_rotary_pos_emb(q, k, cos, sin)`, as `RotaryKernel`."""

    devices: ClassVar[tuple[str, ...]] = ("npu",)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Return queries and keys, rotated; the shapes are those of `RotaryKernel`."""
        import torch_npu

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)

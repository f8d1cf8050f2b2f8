"""Liger's Triton kernels (liger-kernel) in place of transformers' layers, for CUDA devices."""

from typing import ClassVar

from torch import Tensor, nn

from twinkle_kernels.mlp import _GELU_TANH, _SILU


class LigerRMSNorm(nn.Module):
    """`weight * normed`; for layers with `weight` and `variance_epsilon`, as `RMSNormKernel`."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normed states; `hidden_states` is `[..., H]`."""
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        result: Tensor = LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", False
        )
        return result


class LigerShiftedRMSNorm(nn.Module):
    """`(1 + weight) * normed`; for layers with `weight` and `eps`, as `ShiftedRMSNormKernel`."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed states; `x` is `[..., H]`."""
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        result: Tensor = LigerRMSNormFunction.apply(x, self.weight, self.eps, 1.0, "gemma", False)
        return result


class LigerGatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` with SiLU or GELU (tanh); with another activation as the layer does."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output; `x` is `[..., H]`."""
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        gate, up, name = self.gate_proj(x), self.up_proj(x), type(self.act_fn).__name__
        if name in _SILU:
            product = LigerSiLUMulFunction.apply(gate, up)
        else:
            product = LigerGELUMulFunction.apply(gate, up) if name in _GELU_TANH else self.act_fn(gate) * up
        result: Tensor = self.down_proj(product)
        return result


class LigerRotary:
    """`apply_rotary_pos_emb(q, k, cos, sin)`, as `RotaryKernel`."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Return queries and keys, rotated; the shapes are those of `RotaryKernel`."""
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        result: tuple[Tensor, Tensor] = liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return result

"""Kernels: the contract `Kernel`, what puts kernels in place of layers, and every installed kernel by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.kernel.base import Kernel
from twinkle.kernel.builtin import builtin_mapping, liger_builtin, npu_builtin
from twinkle.kernel.place import kernelize, unkernelize
from twinkle.kernel.reference import HubRef, hub

__all__ = ["HubRef", "Kernel", "builtin_mapping", "hub", "kernelize", "liger_builtin", "npu_builtin", "unkernelize"]

__getattr__, __dir__ = room(__name__, "kernel")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_kernels.liger import LigerGatedMLP as LigerGatedMLP
    from twinkle_kernels.liger import LigerRMSNorm as LigerRMSNorm
    from twinkle_kernels.liger import LigerRotary as LigerRotary
    from twinkle_kernels.liger import LigerShiftedRMSNorm as LigerShiftedRMSNorm
    from twinkle_kernels.mlp import GatedMLPKernel as GatedMLPKernel
    from twinkle_kernels.norms import RMSNormKernel as RMSNormKernel
    from twinkle_kernels.norms import ShiftedRMSNormKernel as ShiftedRMSNormKernel
    from twinkle_kernels.npu import NpuGatedMLP as NpuGatedMLP
    from twinkle_kernels.npu import NpuRMSNorm as NpuRMSNorm
    from twinkle_kernels.npu import NpuRotary as NpuRotary
    from twinkle_kernels.npu import NpuShiftedRMSNorm as NpuShiftedRMSNorm
    from twinkle_kernels.rotary import RotaryKernel as RotaryKernel

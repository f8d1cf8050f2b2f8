# Written by `twinkle plugins types`; do not edit.
"""Kernels: the contract `Kernel`, and every installed kernel by name."""

from typing import Any, Protocol, runtime_checkable

from twinkle._registry import lazy_names

__all__ = ["Kernel"]


@runtime_checkable
class Kernel(Protocol):
    """A faster form of a layer's forward or of a function, with the same numbers.

    A subclass of `torch.nn.Module` replaces the forward of a layer: its `forward` runs with the parameters, buffers,
    submodules and attributes of the replaced layer, and its `__init__` never runs. Any other class is built without
    arguments and called with the arguments of the replaced function; to replace the forward of a layer, it gets the
    layer as first argument.

    The class attribute `devices`, such as `devices = ("cuda",)`, limits a kernel to some devices; the default is all.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the replaced layer or function computes."""



from twinkle_kernels.builtin import builtin_mapping as builtin_mapping
from twinkle_kernels.builtin import liger_builtin as liger_builtin
from twinkle_kernels.builtin import npu_builtin as npu_builtin
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
from twinkle_kernels.place import kernelize as kernelize
from twinkle_kernels.place import unkernelize as unkernelize
from twinkle_kernels.reference import HubRef as HubRef
from twinkle_kernels.reference import hub as hub
from twinkle_kernels.rotary import RotaryKernel as RotaryKernel

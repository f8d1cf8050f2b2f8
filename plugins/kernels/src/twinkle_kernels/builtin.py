"""Twinkle's mappings of kernels to layers of the model families of transformers."""

import sys
from collections.abc import Iterator
from typing import Any

_PLAIN = {
    "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "granite": "Granite", "llama": "Llama",
    "ministral": "Ministral", "mistral": "Mistral", "olmoe": "Olmoe", "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3",
}  # fmt: skip
"""Families whose norm is `weight * normed`, by the name of their module and the prefix of their classes."""

_SHIFTED = {
    "gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_next": "Qwen3Next",
}  # fmt: skip
"""Families whose norm is `(1 + weight) * normed`."""

_CPU = ("RMSNormKernel", "ShiftedRMSNormKernel", "GatedMLPKernel")
_LIGER = ("LigerRMSNorm", "LigerShiftedRMSNorm", "LigerGatedMLP")
_NPU = ("NpuRMSNorm", "NpuShiftedRMSNorm", "NpuGatedMLP")


def builtin_mapping(model: Any = None) -> dict[Any, Any]:
    """Return what `kernelize(model)` uses: on a CPU kernels of plain torch; on others Liger's or NPU's where installed.

    Args:
        model: a `torch.nn.Module`, or a model of ours; only its layers are in the mapping. None takes the layers of
            all families that are imported already.

    Returns:
        from layer classes to dicts by device.
    """
    from twinkle.requirements import exists

    devices = {"cpu": _CPU}
    if exists("liger-kernel>=0.8"):
        devices["cuda"] = _LIGER
    if exists("torch-npu"):
        devices["npu"] = _NPU
    return _mapping(model, devices)


def liger_builtin(model: Any = None) -> dict[Any, Any]:
    """Return a mapping to Liger's Triton kernels for CUDA devices; for `model`, see `builtin_mapping`.

    Raises:
        RequirementMissing: liger-kernel is not installed.
    """
    from twinkle.requirements import requires

    requires("liger-kernel>=0.8")
    return _mapping(model, {"cuda": _LIGER})


def npu_builtin(model: Any = None) -> dict[Any, Any]:
    """Return a mapping to torch-npu's kernels for Ascend devices; for `model`, see `builtin_mapping`.

    Raises:
        RequirementMissing: torch-npu is not installed.
    """
    from twinkle.requirements import requires

    requires("torch-npu")
    return _mapping(model, {"npu": _NPU})


def _mapping(model: Any, devices: dict[str, tuple[str, str, str]]) -> dict[Any, Any]:
    from twinkle_kernels.finding import layer_class, torch_module

    wanted = None if model is None else {layer_class(layer) for layer in torch_module(model).modules()}
    return {
        cls: {device: names[sort] for device, names in devices.items()}
        for cls, sort in known_layers()
        if wanted is None or cls in wanted
    }


def known_layers() -> Iterator[tuple[type, int]]:
    """Yield the layer classes that are imported, with their sort: 0 plain norm, 1 shifted norm, 2 gated MLP."""
    for sort, families in enumerate((_PLAIN, _SHIFTED)):
        for family, prefix in families.items():
            module = sys.modules.get(f"transformers.models.{family}.modeling_{family}")
            for name, what in (("RMSNorm", sort), ("MLP", 2)):
                cls = vars(module).get(prefix + name) if module is not None else None
                if cls is not None:
                    yield cls, what

"""What the contract kit calls these kernels with, and what they replace."""

from collections.abc import Callable
from functools import partial
from typing import Any


def rms_norm() -> dict[str, Any]:
    """Return the example of the plain norm: its layer is Llama's."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _norm(LlamaRMSNorm)


def shifted_rms_norm() -> dict[str, Any]:
    """Return the example of the shifted norm: its layer is Gemma 3's."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    return _norm(Gemma3RMSNorm)


def gated_mlp() -> dict[str, Any]:
    """Return the example of the MLP: its layer is Llama's."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaMLP

    from twinkle.testing import tiny_config

    layer = LlamaMLP(tiny_config("llama", hidden_size=8, intermediate_size=12))
    weights = [torch.randn(p.shape, generator=_draw()) * 0.3 for p in layer.parameters()]
    return _layer(layer, [torch.randn(2, 5, 8, generator=_draw()), *weights], ("float64", "float32", "bfloat16"))


def rotary() -> dict[str, Any]:
    """Return the example of rotary embeddings: the function is Llama's."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = (torch.randn(2, heads, 5, 8, generator=_draw()) for heads in (4, 2))
    angles = torch.randn(2, 5, 8, generator=_draw())
    # cos and sin get no gradient: they are bound, not given.
    pair = {"cos": angles.cos().double(), "sin": angles.sin().double()}

    def with_angles(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k: function(q, k, **{name: value.to(q.dtype) for name, value in pair.items()})

    return {
        "reference": with_angles(apply_rotary_pos_emb), "arguments": [q, k], "call": with_angles,
        "dtypes": ("float64", "float32", "bfloat16"),
    }  # fmt: skip


def _norm(cls: Any) -> dict[str, Any]:
    import torch

    x, weight = torch.randn(3, 5, 16, generator=_draw()), torch.randn(16, generator=_draw())
    # The layer itself always computes in float32, so float64 inputs would give no better reference.
    return _layer(cls(16), [x, weight], ("float32", "bfloat16"))


def _layer(layer: Any, arguments: list[Any], dtypes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "reference": partial(_run, layer, None), "arguments": arguments,
        "call": lambda built: partial(_run, layer, type(built)), "dtypes": dtypes,
    }  # fmt: skip


def _run(layer: Any, kernel: Any, x: Any, *weights: Any) -> Any:
    """Run a copy of a layer with these weights, by a kernel or by itself."""
    import copy

    from torch.func import functional_call

    from twinkle.kernel import kernelize

    names = [name for name, _ in layer.named_parameters()]
    copied = copy.deepcopy(layer)
    if kernel is not None:
        kernelize(copied, {type(layer): kernel})
    return functional_call(copied, dict(zip(names, weights, strict=True)), (x,))


def _draw() -> Any:
    import torch

    return torch.Generator().manual_seed(0)

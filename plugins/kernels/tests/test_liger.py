"""Liger's kernels: their interface where the package is there, their numbers where a CUDA device is."""

import copy
import inspect
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from twinkle.kernel import kernelize, liger_builtin, unkernelize

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; `make gpu` runs these on one")
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def mlp(activation: str) -> Any:
    return LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, hidden_act=activation))


def test_the_functions_take_the_arguments_that_we_give() -> None:
    norm = pytest.importorskip("liger_kernel.ops.rms_norm")
    names = list(inspect.signature(inspect.unwrap(norm.LigerRMSNormFunction.forward)).parameters)
    assert names[:7] == ["ctx", "X", "W", "eps", "offset", "casting_mode", "in_place"]
    rope = pytest.importorskip("liger_kernel.transformers.rope")
    assert {"q", "k", "cos", "sin", "unsqueeze_dim"} <= set(inspect.signature(rope.liger_rotary_pos_emb).parameters)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "layer",
    [LlamaRMSNorm(64), Gemma3RMSNorm(64), mlp("silu"), mlp("gelu_pytorch_tanh")],
    ids=["norm", "shifted norm", "SwiGLU", "GeGLU"],
)
def test_layers_keep_their_numbers(layer: Any, dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    plain = copy.deepcopy(layer).to("cuda", dtype)
    ours = copy.deepcopy(plain)
    kernelize(ours, liger_builtin(ours))
    assert "forward" in vars(ours)
    results = []
    for one in (ours, plain):
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0)).to("cuda", dtype).requires_grad_()
        out = one(x)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *one.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=DTYPES[dtype], atol=DTYPES[dtype] * other.abs().max().item())
    unkernelize(ours)


@pytest.mark.gpu
@needs_cuda
def test_rotary_embeddings_keep_their_numbers() -> None:
    pytest.importorskip("liger_kernel")
    from twinkle.kernel import LigerRotary

    q, k = (torch.randn(2, heads, 9, 32, device="cuda") for heads in (4, 2))
    angles = torch.randn(2, 9, 16, device="cuda").repeat(1, 1, 2)
    expected = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for one, other in zip(LigerRotary()(q.clone(), k.clone(), angles.cos(), angles.sin()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

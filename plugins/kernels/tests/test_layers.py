"""Our kernels against the layers of transformers that they replace, family by family, and inside whole models."""

import copy
import importlib
from typing import Any

import pytest
import torch

from twinkle.errors import RequirementMissing
from twinkle.kernel import builtin_mapping, kernelize, liger_builtin, npu_builtin, unkernelize
from twinkle.requirements import exists
from twinkle_kernels.builtin import _PLAIN, _SHIFTED

FAMILIES = _PLAIN | _SHIFTED
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return result and gradients of a layer."""
    x, weights = x.clone().requires_grad_(), list(layer.parameters())
    out = layer(x)
    top = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [x, *weights], top)]


def compare(layer: Any, dtype: torch.dtype, width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.3)
    layer, x = layer.to(dtype), torch.randn(2, 5, width, generator=draw).to(dtype)
    ours = kernelize(copy.deepcopy(layer))
    assert "forward" in vars(ours)
    found, expected = numbers(ours, x), numbers(layer, x)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * float(other.abs().max()))
    unkernelize(ours)


def layer_of(family: str, name: str) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, FAMILIES[family] + name, None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_of_every_family_keep_their_numbers(family: str, dtype: torch.dtype) -> None:
    compare(layer_of(family, "RMSNorm")(8), dtype, 8)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_mlps_keep_their_numbers(dtype: torch.dtype, activation: str) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12, hidden_act=activation)
    compare(layer_of("llama", "MLP")(config), dtype, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mlp_of_every_family_is_a_gated_one(family: str) -> None:
    cls = layer_of(family, "MLP")
    if cls is None:
        pytest.skip("experts only")
    assert {"gate_proj", "up_proj", "down_proj", "act_fn"} <= {*cls.__init__.__code__.co_names}
    assert cls.forward.__code__.co_names == layer_of("llama", "MLP").forward.__code__.co_names


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_rotary_embeddings_keep_their_numbers(family: str) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kernel = __import__("twinkle_kernels.rotary", fromlist=["RotaryKernel"]).RotaryKernel()
    draw = torch.Generator().manual_seed(0)
    for dim, shape in ((1, (2, 3, 5, 8)), (2, (2, 5, 3, 8))):
        q, k = (torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
        # Halves that differ, which no real model has: the kernel does not lean on it.
        cos, sin = (torch.randn(2, 5, 8, generator=draw, dtype=torch.float64) for _ in range(2))
        results = [f(q, k, cos, sin, unsqueeze_dim=dim) for f in (kernel, module.apply_rotary_pos_emb)]
        grads = [torch.autograd.grad((r[0] * q.detach() ** 2 + r[1] ** 2).sum(), (q, k)) for r in results]
        for one, other in zip([*results[0], *grads[0]], [*results[1], *grads[1]], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rotary_embeddings_of_a_library_are_replaced_by_name(build: Any) -> None:
    model, ids = build(), torch.arange(1, 25).reshape(2, 12)
    path = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
    with torch.no_grad():
        before = model(ids).logits
        kernelize(model, {path: "RotaryKernel"})
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-5)
        unkernelize(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
def test_a_whole_model_keeps_its_numbers(build: Any, architecture: str, dtype: torch.dtype) -> None:
    model, ids = build(architecture, dtype), torch.arange(1, 25).reshape(2, 12)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = model(ids).logits
        return logits, list(torch.autograd.grad(logits.float().square().mean(), list(model.parameters())))

    before, grads = run()
    kernelize(model)
    replaced = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    assert {name[-3:] for name in replaced} == {"MLP", "orm"}
    after, ours = run()
    assert torch.equal(after, before)
    scale = max(float(grad.abs().max()) for grad in grads)
    for one, other in zip(ours, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=scale * (1e-5 if dtype == torch.float32 else 3e-2))
    unkernelize(model)


def kept(layer: Any, x: torch.Tensor) -> int:
    """Return how many numbers autograd keeps of a forward, each storage once, without parameters."""
    sizes, alive = {}, []
    own = {parameter.data_ptr() for parameter in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            sizes[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.clone().requires_grad_())
    return sum(sizes.values())


def test_less_is_kept_for_the_backward() -> None:
    from transformers import LlamaConfig

    size = 2 * 5 * 8 * 4
    x, norm = torch.randn(2, 5, 8), layer_of("llama", "RMSNorm")(8)
    mlp = layer_of("llama", "MLP")(
        LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)
    ).requires_grad_(False)
    for layer, own, ours in ((norm, 2, 1), (mlp, 3, 2)):
        assert kept(layer, x) // size == own
        assert kept(kernelize(layer), x) // size == ours
        unkernelize(layer)


def test_a_second_derivative_is_refused() -> None:
    norm = kernelize(layer_of("llama", "RMSNorm")(8))
    x = torch.randn(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    unkernelize(norm)


def test_the_mapping_holds_the_layers_of_the_model_alone(build: Any) -> None:
    names = {cls.__name__ for cls in builtin_mapping(build("qwen3"))}
    assert names == {"Qwen3RMSNorm", "Qwen3MLP"}
    assert names < {cls.__name__ for cls in builtin_mapping()}


@pytest.mark.skipif(exists("liger-kernel"), reason="liger-kernel is installed")
def test_liger_is_asked_for_where_it_is_missing(build: Any) -> None:
    with pytest.raises(RequirementMissing, match=r"pip install 'liger-kernel>=0\.8'"):
        liger_builtin(build())
    with pytest.raises(RequirementMissing, match=r"LigerRMSNorm.*pip install 'twinkle-kernels\[liger\]'"):
        kernelize(build(), {layer_of("llama", "RMSNorm"): "LigerRMSNorm"})


@pytest.mark.skipif(exists("torch-npu"), reason="torch-npu is installed")
def test_torch_npu_is_asked_for_where_it_is_missing() -> None:
    with pytest.raises(RequirementMissing, match="pip install 'torch-npu'"):
        npu_builtin()

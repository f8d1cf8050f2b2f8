"""CPU time and memory of our kernels against the layers of transformers that they replace.

    OMP_NUM_THREADS=1 python benchmarks/kernels_cpu.py [--repetitions 15]

1. Each layer, forward and backward, and forward alone without gradients: 1,024 tokens, hidden size 576, MLP 1,536 wide,
   9 and 3 heads of 64, in float32 and bfloat16. Norm weights are frozen, as with LoRA, and trained.
2. Bytes that autograd keeps from a layer's forward for its backward, counted by `saved_tensors_hooks`.
3. A model of hidden size 576 and 6 layers with LoRA on all projections, 8 x 128 tokens: CPU time and bytes kept.

Numbers are compared before any time is counted. Goals: a norm <= 0.8 x the time (float32, frozen); no layer keeps more
than transformers' own; the model keeps <= 0.87 x and takes <= 1.03 x the time.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from _pairs import Ratio, describe_machine, paired

Call = Callable[[], Any]
TOKENS, HIDDEN, WIDE = (8, 128), 576, 1536


class Copy(torch.nn.Module):
    """Stands for a projection, whose result is a tensor of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of `x`."""
        return x.clone()


def layers(dtype: torch.dtype) -> dict[str, tuple[Any, list[torch.Tensor], Any]]:
    """Return by name: a layer or function, its arguments, and the kernel for it."""
    from transformers import LlamaConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

    from twinkle.kernel import GatedMLPKernel, RMSNormKernel, RotaryKernel, ShiftedRMSNormKernel

    x = torch.randn(*TOKENS, HIDDEN).to(dtype)
    frozen, shifted = LlamaRMSNorm(HIDDEN).to(dtype).requires_grad_(False), Gemma3RMSNorm(HIDDEN).to(dtype)
    mlp = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDE)).to(dtype).requires_grad_(False)
    # Without its products of matrices, which are the same on both sides and most of the time.
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = Copy(), Copy(), torch.nn.Identity()
    wide = torch.randn(*TOKENS, WIDE).to(dtype)
    q, k = (torch.randn(*TOKENS, heads, 64).to(dtype).transpose(1, 2) for heads in (9, 3))
    angles = torch.randn(*TOKENS, 64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return {
        "RMSNorm, frozen": (frozen, [x], RMSNormKernel),
        "RMSNorm, trained": (LlamaRMSNorm(HIDDEN).to(dtype), [x], RMSNormKernel),
        "RMSNorm of Gemma, frozen": (shifted.requires_grad_(False), [x], ShiftedRMSNormKernel),
        "gate of the MLP": (mlp, [wide], GatedMLPKernel),
        "rotary": (
            lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), [q, k], lambda q, k: RotaryKernel()(q, k, cos, sin),
        ),
    }  # fmt: skip


def pair(layer: Any, kernel: Any) -> tuple[Any, Any]:
    """Return what is called on our side and on theirs."""
    if not isinstance(layer, torch.nn.Module):
        return kernel, layer
    import copy

    from twinkle.kernel import kernelize

    return kernelize(copy.deepcopy(layer), {type(layer): kernel}), layer


def training(function: Any, arguments: list[torch.Tensor]) -> Call:
    """Return a forward and backward; it returns results and gradients."""
    leaves = [value.clone().requires_grad_() for value in arguments]

    def call() -> list[torch.Tensor]:
        found = function(*leaves)
        found = found if isinstance(found, tuple) else (found,)
        weights = [p for p in getattr(function, "parameters", list)() if p.requires_grad]
        return [*found, *torch.autograd.grad(found, [*leaves, *weights], [torch.ones_like(r) for r in found])]

    return call


def scoring(function: Any, arguments: list[torch.Tensor]) -> Call:
    """Return a forward without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function(*arguments)

    return call


def kept(call: Call, function: Any) -> int:
    """Return the bytes of all tensors that autograd keeps while `call` runs, each storage once; no parameters."""
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []
    own = {parameter.untyped_storage().data_ptr() for parameter in getattr(function, "parameters", list)()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(sizes.values())


def tiny_lora() -> Any:
    """Return a language model with LoRA on all projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=8, target_modules="all-linear"))


def step(model: Any) -> Call:
    """Return a forward and backward of the model."""
    ids = torch.arange(TOKENS[0] * TOKENS[1]).reshape(TOKENS) % 500

    def call() -> float:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach())

    return call


def compare_layers(repetitions: int) -> list[str]:
    """Print a line for each layer and dtype, and return which goals are missed."""
    missed = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, (layer, arguments, kernel) in layers(dtype).items():
            ours, theirs = pair(layer, kernel)
            for one, other in zip(training(ours, arguments)(), training(theirs, arguments)(), strict=True):
                torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 if dtype != torch.float32 else 1e-4)
            both = paired(training(ours, arguments), training(theirs, arguments), repetitions)[2]
            alone = paired(scoring(ours, arguments), scoring(theirs, arguments), repetitions)[2]
            memory = kept(training(ours, arguments), ours) / kept(training(theirs, arguments), theirs)
            print(f"{str(dtype)[6:]:9} {name:25} forward and backward {both}  forward {alone}  kept {memory:.2f}")
            if memory > 1 or (
                "norm" in name.lower() and "frozen" in name and dtype == torch.float32 and both.median > 0.8
            ):
                missed.append(f"{name} in {dtype}")
    return missed


def compare_models(repetitions: int) -> list[str]:
    """Print the line of the whole model, and return which goals are missed."""
    from twinkle.kernel import kernelize

    ours, theirs = kernelize(tiny_lora()), tiny_lora()
    assert abs(step(ours)() - step(theirs)()) < 1e-5
    time: Ratio = paired(step(ours), step(theirs), repetitions)[2]
    sizes = kept(step(ours), ours), kept(step(theirs), theirs)
    memory = sizes[0] / sizes[1]
    print(f"model with LoRA: time {time}  kept {memory:.3f} ({sizes[0] / 2**20:.0f} of {sizes[1] / 2**20:.0f} MiB)")
    return ["model"] if memory > 0.87 or time.median > 1.03 else []


def main() -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    print(describe_machine(["torch", "transformers", "peft"]))
    missed = compare_layers(repetitions) + compare_models(max(5, repetitions // 3))
    print("missed: " + ", ".join(missed) if missed else "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Qwen3 MoE under FSDP2 with transformers 4: every expert runs on every rank, so that all ranks wait for each other.

transformers 4 holds each expert as a module of its own and skips those to which the router sends no token. Which they
are differs from rank to rank, and so do then the gathers and reductions that FSDP2 issues for them: training hangs, or,
where as many are skipped on each rank, mixes the weights of different experts.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from twinkle.errors import PatchError
from twinkle.patch import Patch

BLOCKS = ("Qwen3MoeSparseMoeBlock",)


class Qwen3MoeTransformers4Patch(Patch):
    """Each mixture-of-experts block runs all its experts, in their order; those without tokens on an empty batch.

    The numbers are the same, and experts without tokens get gradients of zero instead of none.
    """

    versions: ClassVar[dict[str, str]] = {"transformers": ">=4.51,<5"}
    changes = ("<model>...mlp.forward of each Qwen3MoeSparseMoeBlock",)
    needed = "to train Qwen3 MoE models under FSDP2"
    otherwise = "transformers 5 computes all experts of a layer from one tensor and does not hang: leave the patch out"

    def __call__(self, module: Any) -> Any:
        """Apply the patch to a Qwen3 MoE model, or to a PEFT model around one, and return it.

        Raises:
            PatchError: there is no such block in it, or one is built in another way.
        """
        blocks = [part for part in module.modules() if type(part).__name__ in BLOCKS]
        if not blocks:
            raise PatchError(f"{type(module).__name__} has no {' or '.join(BLOCKS)}; the patch is for Qwen3 MoE models")
        for block in blocks:
            if lacking := [name for name in ("gate", "experts", "top_k", "norm_topk_prob") if not hasattr(block, name)]:
                raise PatchError(
                    f"{type(block).__name__} has no {', '.join(lacking)}; this patch does not know its code"
                )
            self.wrap(block, "forward", run_every_expert)
        return module


def run_every_expert(forward: Callable[..., Any], hidden_states: Any) -> tuple[Any, Any]:
    """Compute a block's output and router logits.

    Args:
        forward: the block's own forward; it is not called.
        hidden_states: `[B, T, H]`.

    Returns:
        the output `[B, T, H]` and the router's logits `[B * T, experts]`.
    """
    import torch

    block = forward.__self__  # type: ignore[attr-defined]
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = block.gate(tokens)
    weights, chosen = torch.topk(logits.softmax(-1, dtype=torch.float32), block.top_k, dim=-1)
    if block.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights.to(tokens.dtype)
    out = torch.zeros_like(tokens)
    for index, expert in enumerate(block.experts):
        places, ranks = (chosen == index).nonzero(as_tuple=True)
        made = expert(tokens[places]) * weights[places, ranks, None]
        out = out.index_add(0, places, made.to(out.dtype))
    return out.reshape(hidden_states.shape), logits

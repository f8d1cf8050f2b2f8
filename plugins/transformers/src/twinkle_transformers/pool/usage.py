"""Exact cost of operations: tokens, and the floating-point operations of products with weights."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from twinkle.engine import Usage
from twinkle_torch.layout import Layout
from twinkle_transformers.pool.passes import ForwardPass
from twinkle_transformers.pool.work import MicroBatch

_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Names of the number of experts per token in configurations of models."""


class UsageMeter:
    """Counts the tokens and floating-point operations of passes.

    It counts products of a token with weights, at two operations a weight: linear layers of the text decoder (of
    experts, those that the token is routed to), the output projection, and the adapter's matrices. It does not count
    embeddings, norms, convolutions, and products of attention between tokens.

    Args:
        model: the Hugging Face module.

    Attributes:
        base: number of weights of the base model that a token is multiplied with.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        counts = (getattr(config, name, None) for name in _ACTIVE)
        self._active = next((count for count in counts if isinstance(count, int)), 1)
        self._shares = dict(self._listed_experts(model))
        self.base = sum(self._met(*weight) for weight in _weights(model))
        self.of_adapter = lru_cache(maxsize=None)(self._of_adapter)

    def _met(self, path: str, count: int, experts: int) -> float:
        """Return how many of the weights at `path` a token is multiplied with."""
        return count * (min(self._active, experts) / experts if experts else self._shares.get(path, 1.0))

    def _of_adapter(self, layout: Layout) -> float:
        """Return how many weights of an adapter a token is multiplied with."""
        return sum(
            self._met(name, s.rank * (s.fan_in + s.fan_out) * max(1, s.experts), s.experts)
            for name, s in layout.shapes.items()
        )

    def _listed_experts(self, model: Any) -> Iterator[tuple[str, float]]:
        """Yield the modules of experts in a `ModuleList`, and the share of tokens that is routed to each."""
        for path, module in model.named_modules():
            if path.endswith(".experts") and isinstance(module, nn.ModuleList):
                share = min(self._active, len(module)) / len(module)
                yield from ((f"{path}.{name}", share) for name, _ in module.named_modules())

    def of(self, forward_pass: ForwardPass) -> Iterator[tuple[MicroBatch, Usage]]:
        """Yield the cost of each micro-batch of a pass.

        With recomputed activations every token runs through the model twice. Padding tokens of a very small pass count
        for the last micro-batch, so that the sum over all is what was computed.
        """
        twice = 2 if forward_pass.recomputed else 1
        last = max(forward_pass.parts, key=lambda part: int(part.stream[-1])) if forward_pass.stream.padding else None
        for part in forward_pass.parts:
            tenant = part.work.tenant
            own = 0.0 if tenant is None else self.of_adapter(tenant.plan.layout)
            forward = 2 * self.base + 2 * own
            back = 2 * self.base + 4 * own if part.work.training else 0.0
            padded = forward_pass.stream.padding * twice if part is last else 0
            yield part, Usage(part.tokens, part.computed * twice, padded, part.computed * (twice * forward + back))


def _weights(model: Any) -> Iterator[tuple[str, int, int]]:
    """Yield path, number of weights, and number of experts (or 0) of each matrix that tokens are multiplied with."""
    head = model.get_output_embeddings()
    inside = {id(module) for module in model.get_decoder().modules()} - {id(head)}
    for path, module in model.named_modules():
        if id(module) not in inside or isinstance(module, (nn.Embedding, nn.Conv1d)):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim in (2, 3) and not name.endswith("bias"):
                yield path, weight.numel(), weight.shape[0] if weight.ndim == 3 else 0
    if head is not None:
        yield "", head.weight.numel(), 0

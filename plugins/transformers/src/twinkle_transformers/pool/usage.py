"""What operations cost, exactly: tokens, and the floating-point operations of the products with weights."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from twinkle.engine import Usage
from twinkle_torch.layout import Layout
from twinkle_transformers.pool.passes import ForwardPass
from twinkle_transformers.pool.work import MicroBatch

_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""What models' configurations call the number of experts that a token goes to."""


class UsageMeter:
    """Counts the tokens of passes and what they cost.

    Counted are the products of a token with weights, two operations a number: the linear layers of the text decoder
    (of experts, those that a token goes to), the output projection, and the adapter's own. Embeddings, norms,
    convolutions and attention's products of tokens with tokens are not.

    Args:
        model: the Hugging Face module.

    Attributes:
        base: numbers of the base model that a token meets.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        counts = (getattr(config, name, None) for name in _ACTIVE)
        self._active = next((count for count in counts if isinstance(count, int)), 1)
        self._shares = dict(self._listed_experts(model))
        self.base = sum(self._met(*weight) for weight in _weights(model))
        self.of_adapter = lru_cache(maxsize=None)(self._of_adapter)

    def _met(self, path: str, count: int, experts: int) -> float:
        """Return how many of the numbers at `path` a token meets."""
        return count * (min(self._active, experts) / experts if experts else self._shares.get(path, 1.0))

    def _of_adapter(self, layout: Layout) -> float:
        """Return the numbers of an adapter that a token meets."""
        return sum(
            self._met(name, s.rank * (s.fan_in + s.fan_out) * max(1, s.experts), s.experts)
            for name, s in layout.shapes.items()
        )

    def _listed_experts(self, model: Any) -> Iterator[tuple[str, float]]:
        """Yield the modules inside of experts that are a list of modules, and which share of tokens goes to each."""
        for path, module in model.named_modules():
            if path.endswith(".experts") and isinstance(module, nn.ModuleList):
                share = min(self._active, len(module)) / len(module)
                yield from ((f"{path}.{name}", share) for name, _ in module.named_modules())

    def of(self, forward_pass: ForwardPass) -> Iterator[tuple[MicroBatch, Usage]]:
        """Yield what each part of a pass cost.

        Where activations were recomputed, every token of the pass went through the model twice. Tokens that fill a
        pass of very few up are the last part's, so that the sum over all parts is what was computed.
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
    """Yield path, numbers, and number of experts (or 0) of each matrix that tokens are multiplied with."""
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

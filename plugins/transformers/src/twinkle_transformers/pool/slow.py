"""The slower way of models that cannot see several sequences in one row: each sequence goes through them alone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import Unsupported
from twinkle.logging import get_logger
from twinkle_torch.numerics import evaluating, judge, probe_tokens, turned_off
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.pool.stream import Stream
from twinkle_transformers.segments import Scope, is_routed

_TOKENS, _SAME = 7, 4
"""Length of two rows that tell whether a model sees what comes later, and how many tokens they have in common."""


def goes_alone(backbone: Backbone) -> bool:
    """Say whether each sequence must go through a model alone, which is slower; the log says so once.

    Raises:
        Unsupported: not even that is right: the model's tokens see those that come after them, say.
    """
    name = type(backbone.model).__name__
    off = turned_off("fused")
    if off is None and backbone.segmenter.check() is None:
        if mixers := backbone.segmenter.mixers:
            get_logger().info(
                "%s: %s sees sequences of one length at a time, which is slower than one call for all", name,
                ", ".join(mixers),
            )  # fmt: skip
        return False
    if (wrong := _against(backbone)) is not None:
        raise Unsupported(f"{name} cannot carry the adapters of a pool: {wrong}")
    get_logger().warning(
        "%s: adapters do not share passes: %s. Each sequence goes through the model alone: the results are the same, "
        "and short rows take longer", name, backbone.segmenter.reason if off is None else off.reason,
    )  # fmt: skip
    return True


def run_alone(call: Callable[[Mapping[str, Tensor]], Tensor], stream: Stream) -> Tensor:
    """Return what a model computes of a stream, `[T, ...]`, each sequence by itself.

    Args:
        call: takes `input_ids` `[1, t]` and returns `[t, ...]`.
        stream: without shared prefixes.
    """
    scope = Scope(stream.segments, None, stream.routing)
    found = []
    for number, (start, stop) in enumerate(stream.segments.bounds):
        with scope.only((number,)):
            found.append(call({"input_ids": stream.ids[:, start:stop]}))
    return torch.cat(found)


def _against(backbone: Backbone) -> str | None:
    """Return why a row of a model's tokens, alone, is not what a causal language model computes of it."""
    model: Any = backbone.model
    vocabulary = model.config.get_text_config().vocab_size
    one, two = (probe_tokens(_TOKENS, vocabulary, changed=changed) for changed in (False, True))
    ids, other = (torch.tensor([row], device=model.device) for row in (one, [*one[:_SAME], *two[_SAME:]]))

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return found

    with evaluating(model):
        found = judge("causal order", logits, logits, ids, [(other, range(_SAME))], routed=is_routed(model))
    if found.exact:
        return None
    if found.method == "structure":
        return f"it does not run on tokens alone ({found.reason})"
    return f"its tokens see those that come after them: {found.reason}"

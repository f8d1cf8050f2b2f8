"""A batch of sequences half-way through a model: key-value cache, mask, positions, and the logits of the next token."""

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Within = Callable[[int], AbstractContextManager[Any]]
"""Gives the context of a call with so many tokens."""


@dataclass(slots=True)
class Frontier:
    """Sequences that a model has read, ready for one more token each.

    Attributes:
        cache: the model's key-value cache of B sequences.
        mask_BT: int64 `[B, T]`: 1 where a token is real; rows are padded on the left.
        positions_B: int64 `[B]`: position of the next token.
        logits_BV: `[B, V]`: of the next token.
        seen_BV: bool `[B, V]`: tokens that occurred, where somebody needs to know.
    """

    cache: Any
    mask_BT: Tensor
    positions_B: Tensor
    logits_BV: Tensor
    seen_BV: Tensor | None = None

    def repeated(self, count: int, *, last: bool) -> "Frontier":
        """Return a frontier with each row `count` times in succession; with `last` this one may be used up."""
        frontier = Frontier(
            self.cache if last else copy.deepcopy(self.cache),
            self.mask_BT,
            self.positions_B,
            self.logits_BV,
            self.seen_BV,
        )
        if count > 1:
            frontier.keep([row for row in range(len(self.mask_BT)) for _ in range(count)])
        return frontier

    def keep(self, rows: Sequence[int]) -> None:
        """Make these the rows, in place; one may come several times."""
        index = torch.tensor(rows, device=self.mask_BT.device)
        self.cache.reorder_cache(index)  # of all selections, the one that layers with a recurrent state know too
        self.mask_BT, self.positions_B = self.mask_BT[index], self.positions_B[index]
        self.logits_BV = self.logits_BV[index]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[index]


class CachedModel:
    """Runs a causal language model of transformers with its key-value cache."""

    def __init__(self, module: nn.Module, base: nn.Module, within: Within | None = None) -> None:
        """Wrap a module.

        Args:
            module: what is called: the model, or PEFT's wrapper around it.
            base: the model itself.
            within: gives the context in which it is called with so many tokens, padding included.
        """
        self.module = module
        self._within = within or (lambda tokens: nullcontext())
        embedding: Any = base.get_input_embeddings()  # type: ignore[operator]
        self.device: torch.device = embedding.weight.device
        self.vocabulary = int(embedding.weight.shape[0])
        self._last_only = "logits_to_keep" in inspect.signature(base.forward).parameters

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, whole: bool = False, seen: bool = False
    ) -> tuple[Frontier, Tensor]:
        """Read prompts of any lengths, padded on the left.

        Args:
            prompts: token ids, at least one a row.
            whole: compute the logits of every position.
            seen: keep account of the tokens that occur.

        Returns:
            the frontier, and logits `[B, T, V]` of every position (of the last one only, T = 1, unless `whole`).
        """
        size = max(len(ids) for ids in prompts)
        ids_BT = torch.tensor([[0] * (size - len(ids)) + list(ids) for ids in prompts], device=self.device)
        mask_BT = torch.tensor([[0] * (size - len(ids)) + [1] * len(ids) for ids in prompts], device=self.device)
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        logits_BTV, cache = self._run(ids_BT, mask_BT, positions_BT, None, whole)
        frontier = Frontier(cache, mask_BT, positions_BT[:, -1] + 1, logits_BTV[:, -1])
        if seen:
            counts = torch.zeros(frontier.logits_BV.shape, dtype=torch.int64, device=self.device)
            frontier.seen_BV = counts.scatter_add(-1, ids_BT, mask_BT) > 0
        return frontier, logits_BTV

    def step(self, frontier: Frontier, tokens_B: Tensor) -> None:
        """Read one more token a row, in place."""
        frontier.mask_BT = torch.cat([frontier.mask_BT, torch.ones_like(frontier.mask_BT[:, :1])], dim=-1)
        logits_BTV, frontier.cache = self._run(
            tokens_B[:, None], frontier.mask_BT, frontier.positions_B[:, None], frontier.cache, False
        )
        frontier.positions_B = frontier.positions_B + 1
        frontier.logits_BV = logits_BTV[:, -1]

    def _run(
        self, ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: Any, whole: bool
    ) -> tuple[Tensor, Any]:
        last = {"logits_to_keep": 1} if self._last_only and not whole else {}
        with self._within(ids_BT.numel()):
            output = self.module(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache,
                use_cache=True, **last,
            )  # fmt: skip
        logits_BTV = output.logits if whole else output.logits[:, -1:]
        return logits_BTV, output.past_key_values


@dataclass(frozen=True, slots=True)
class SequenceBytes:
    """Bytes that a decode loop needs for a sequence: `fixed + per_token * tokens`, and what one step computes.

    Attributes:
        fixed: of states that do not grow.
        per_token: of keys and values.
        per_prompt_token: activations of one layer while a prompt is read.
        step: logits, and what drawing makes of them.
    """

    fixed: int
    per_token: int
    per_prompt_token: int
    step: int

    @classmethod
    def of(cls, model: CachedModel, hidden: int) -> "SequenceBytes":
        """Measure a model on two short prompts; `hidden` is the size of its hidden states."""
        sizes = [_cache_bytes(model.prefill([[1] * length])[0].cache) for length in _MEASURED]
        per_token = max(0, sizes[1] - sizes[0]) // (_MEASURED[1] - _MEASURED[0])
        # A layer with gates makes 12 to 16 numbers for each hidden one; drawing copies logits in float32 and int64.
        return cls(max(0, sizes[0] - per_token * _MEASURED[0]), per_token, 64 * hidden, 32 * model.vocabulary)

    def needed(self, tokens: int, prompt: int) -> int:
        """Return the bytes for a sequence of so many tokens; its keys and values are copied as they grow."""
        return 2 * (self.fixed + self.per_token * tokens) + self.per_prompt_token * prompt + self.step


_MEASURED = (4, 8)


def _cache_bytes(cache: Any) -> int:
    layers = getattr(cache, "layers", None) or [cache]
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)

"""The side of a model: its weights as they are now, merged or as an adapter alone."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from peft import PeftModel
from torch import Tensor

from twinkle import remote_function
from twinkle.checkpoint_engine import CheckpointEngineMixin
from twinkle.errors import ArgumentError, Unsupported
from twinkle_transformers.sync.base import base_weights, ties
from twinkle_transformers.sync.terms import Changes, Term, changes_of

Weights = Iterator[tuple[str, Tensor]]


class SendsWeights(CheckpointEngineMixin):
    """What a model adds to `CheckpointEngineMixin`: it sends weights, and writes none of its own."""

    model: Any
    parallel: Any

    @remote_function(dispatch="all")
    def send_weights(
        self,
        adapter_name: str | None = None,
        base_sync_done: bool = False,
        merge_and_sync: bool = False,
        model_keys: Sequence[str] | None = None,
    ) -> None:
        """Send weights by the engine that a `CheckpointEngineManager` prepared, and wait until they were taken.

        Weights of the base come under the names of the Hugging Face model, tied ones once; A and B of an adapter come
        after them under PEFT's.

        Args:
            adapter_name: which adapter; by default the active one. Where there is none, all weights are sent.
            base_sync_done: send the adapter alone.
            merge_and_sync: send the base with the adapter merged into it, and no adapter.
            model_keys: names of the weights that the receiver has, to be compared before anything is computed.

        Raises:
            ArgumentError: the receiver lacks a weight, or `base_sync_done` with `merge_and_sync`.
            Unsupported: the adapter cannot be merged, or not be sent alone, or the model is sharded.
        """
        weights = self._outgoing(adapter_name, base_sync_done, merge_and_sync, model_keys)
        asyncio.run(self.checkpoint_engine.send_weights(weights))

    def _outgoing(
        self, adapter_name: str | None, base_sync_done: bool, merge_and_sync: bool, model_keys: Sequence[str] | None
    ) -> Weights:
        if base_sync_done and merge_and_sync:
            raise ArgumentError(
                "send_weights: merge_and_sync=True sends the base each time, so base_sync_done=True has no meaning"
            )
        if self.parallel.in_lockstep:
            raise Unsupported(
                "send_weights: the model is sharded over ranks (fsdp), and its weights are not gathered; save it and "
                "sample from the folder, or use a mesh without fsdp"
            )
        name, changes = self._changes(adapter_name)
        base = {} if base_sync_done else base_weights(self._causal)
        if missing := sorted(set(base) - set(base if model_keys is None else model_keys)):
            raise ArgumentError(
                f"send_weights: the sampler has no {missing[0]!r} ({len(missing)} such weights); make it of the model "
                "that is trained"
            )
        if not name or merge_and_sync:
            return _base(base, changes, name)
        return _with_adapter(base, changes, name)

    @property
    def _causal(self) -> Any:
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def _changes(self, adapter_name: str | None) -> tuple[str, Changes]:
        """Return the name of an adapter and what it changes; without adapters "" and nothing."""
        group: Any = self._group(adapter_name)  # type: ignore[attr-defined]
        name: str = group.adapter_name
        return name, changes_of(self.model, name) if name else Changes()


def _base(base: dict[str, Tensor], changes: Changes, adapter: str) -> Weights:
    """Yield the base, each weight that the adapter changes as it is with it; a merged one when it is asked for."""
    tied = ties(base)
    changed = changes.adapted(base)
    for name in changed:
        if name not in base:
            raise Unsupported(f"adapter {adapter!r} changes {name}, which the base does not have")
        if name in tied or name in tied.values():
            pair = next((other, first) for other, first in tied.items() if name in (other, first))
            raise Unsupported(
                f"adapter {adapter!r} changes {name}, and this model has one weight for {' and '.join(pair)}, so that "
                "merging would change both; use merge_and_sync=False, or leave the layer out of the adapter"
            )
    return _merged(base, changed, tied)


def _merged(base: dict[str, Tensor], changed: dict[str, Tensor | Term], tied: dict[str, str]) -> Weights:
    for name, weight in base.items():
        if name not in tied:
            change = changed.get(name, weight)
            yield name, change.merged(weight.detach()) if isinstance(change, Term) else change.detach()


def _with_adapter(base: dict[str, Tensor], changes: Changes, adapter: str) -> Weights:
    if changes.beyond is not None:
        raise Unsupported(
            f"adapter {adapter!r} has {changes.beyond}, which cannot be sent as an adapter; use merge_and_sync=True"
        )
    return _one_after_the_other(base, changes)


def _one_after_the_other(base: dict[str, Tensor], changes: Changes) -> Weights:
    yield from _merged(base, {}, ties(base))
    for place, term in changes.terms.items():
        yield f"base_model.model.{place}.lora_A.weight", term.down
        yield f"base_model.model.{place}.lora_B.weight", term.up

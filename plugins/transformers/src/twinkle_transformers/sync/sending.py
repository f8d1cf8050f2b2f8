"""The weights that a model sends to a sampler, in their present state: merged with an adapter, or beside it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle_transformers.loaded_model import LoadedModel
from twinkle_transformers.sync.terms import Changes, Term, base_weights, ties
from twinkle_transformers.training import Adapters

Weights = Iterator[tuple[str, Tensor]]


def outgoing_weights(
    loaded: LoadedModel, adapters: Adapters, adapter_name: str | None, base_sync_done: bool, merge_and_sync: bool,
    model_keys: Sequence[str] | None,
) -> Weights:  # fmt: skip
    """Return the weights that a model sends; the arguments are those of `TransformersModel.send_weights`.

    Raises:
        ArgumentError: the receiver lacks a weight, or `base_sync_done` with `merge_and_sync`.
        Unsupported: the adapter cannot be merged or sent alone, or the model is sharded.
    """
    if base_sync_done and merge_and_sync:
        raise ArgumentError(
            "send_weights: merge_and_sync=True sends the base each time, so base_sync_done=True has no meaning"
        )
    if loaded.parallel.in_lockstep:
        raise Unsupported(
            "send_weights: the model is sharded over ranks (fsdp), and its weights are not gathered; save it and "
            "sample from the folder, or use a mesh without fsdp"
        )
    name, changes = adapters.changes(adapter_name)
    base = {} if base_sync_done else base_weights(loaded.backbone.model)
    if missing := sorted(set(base) - set(base if model_keys is None else model_keys)):
        raise ArgumentError(
            f"send_weights: the sampler has no {missing[0]!r} ({len(missing)} such weights); create the sampler from "
            "the model that is trained"
        )
    if not name or merge_and_sync:
        return _base(base, changes, name)
    return _with_adapter(base, changes, name)


def _base(base: dict[str, Tensor], changes: Changes, adapter: str) -> Weights:
    """Return the weights of the base with the adapter merged; each is merged when it is requested, to save memory."""
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

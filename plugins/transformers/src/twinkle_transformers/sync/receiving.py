"""The receiving side of a weight transfer: a sampler validates all received weights before it writes the first."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from twinkle import remote_function
from twinkle.checkpoint_engine import CheckpointEngine, CheckpointEngineMixin
from twinkle.errors import ArgumentError, Unsupported
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.sampling.adapters import arrived_version
from twinkle_transformers.sampling.engine import SamplingService
from twinkle_transformers.sampling.sources import OwnWeights, SharedModel, Source
from twinkle_transformers.sync.terms import base_weights, ties

ADAPTER = "base_model.model."
Arrived = dict[str, Tensor]


class ReceivesWeights(CheckpointEngineMixin):
    """Receives weights for a sampler, either all of them or none."""

    _source: Source
    _service: SamplingService
    _base_writes: int = 0

    reset_prefix_cache: Callable[[], None]

    def get_state_keys(self) -> list[str]:
        """Return the names of the weights that are sampled from, without adapters."""
        return sorted(base_weights(self._source.base))

    def count_base_writes(self) -> int:
        """Return how often the base weights were written, so that a caller can detect writes by others."""
        return self._base_writes

    @remote_function(dispatch="all")
    def receive_weights(
        self,
        base_sync_done: bool = False,
        peft_config: Mapping[str, Any] | None = None,
        *,
        adapter_name: str | None = None,
    ) -> None:
        """Receive weights from the engine that a `CheckpointEngineManager` prepared, and sample with them from now on.

        All weights are compared with the sampler's own before the first is written. Before the base is written, running
        requests are completed, and new ones wait. A new adapter does not replace the old one for running requests,
        which finish on the weights they started with.

        Args:
            base_sync_done: only an adapter is transferred.
            peft_config: configuration of the adapter; None without an adapter, and requests then use none by default.
            adapter_name: additional name of the adapter, which also becomes the default.

        Raises:
            ArgumentError: a weight is missing, unexpected, or has another shape or dtype.
            CheckpointError: the adapter belongs to another model.
            Unsupported: the sampler shares the weights of a live model.
        """
        source = self._own_weights()
        base, adapter = split(collect(self.checkpoint_engine))
        if bool(adapter) != (peft_config is not None) or (base_sync_done and base):
            raise ArgumentError(
                f"receive_weights: {len(base)} weights of the base and {len(adapter)} of an adapter arrived, which "
                f"contradicts base_sync_done={base_sync_done} and {'a' if peft_config else 'no'} peft_config"
            )
        pairs = [] if base_sync_done else pair(source.base, base)
        version = self._version(adapter, peft_config, adapter_name) if adapter else None
        if base_sync_done:
            with self._service.gate:
                source.set_default(version, adapter_name)
        else:
            with self._service.at_rest():
                self._base_writes += 1
                write(pairs)
                source.set_default(version, adapter_name)
        self.reset_prefix_cache()

    def shares_weights(self, model: Any) -> bool:
        """Return whether this sampler samples from the module that `model` trains."""
        return isinstance(self._source, SharedModel) and self._source.base is SharedModel(model).base

    def publish_adapter(self, adapter_name: str | None = None) -> None:
        """Sample with the present weights of an adapter of the shared model, until it is published again.

        The adapter becomes the default, and is used under its name. Adapters that were never published, and a full
        model without adapters, are sampled with their current weights during training.

        Args:
            adapter_name: by default the model's active one; required if several adapters share the model.

        Raises:
            ArgumentError: there is no such adapter, or the sampler has weights of its own.
            Unsupported: the adapter is more than low-rank terms of linear layers.
        """
        if not isinstance(self._source, SharedModel):
            raise ArgumentError(
                "publish_adapter: this sampler has its own weights; send it the model's with "
                "CheckpointEngineManager(model, sampler).sync_weights()"
            )
        with self._service.gate:
            self._source.publish(adapter_name, self._service.runner)
        self.reset_prefix_cache()

    def _own_weights(self) -> OwnWeights:
        if isinstance(self._source, OwnWeights):
            return self._source
        raise Unsupported(
            "receive_weights: this sampler shares the weights of a live model, which only its training may change; "
            "give it its own weights (model_id=), or sync it with that model, which publishes an adapter"
        )

    def _version(self, adapter: Arrived, config: Mapping[str, Any] | None, adapter_name: str | None) -> AdapterVersion:
        known = {field.name for field in fields(LoraConfig) if field.init}
        read = LoraConfig(**{name: value for name, value in (config or {}).items() if name in known})
        what = f"the adapter {adapter_name!r} that arrived" if adapter_name else "the adapter that arrived"
        return arrived_version(adapter, read, self._source.sites(self._service.runner), what, self._own_weights().spare)


def collect(engine: CheckpointEngine) -> Arrived:
    """Return all weights of a transfer by name."""
    arrived: Arrived = {}

    async def take() -> None:
        async with aclosing(engine.receive_weights()) as arriving:  # type: ignore[type-var]
            async for name, tensor in arriving:
                arrived[name] = tensor.clone() if engine.reuses_memory else tensor

    asyncio.run(take())  # asyncio's debug mode would format a returned value
    return arrived


def split(arrived: Arrived) -> tuple[Arrived, Arrived]:
    """Return the weights of the base, and those of the adapter."""
    adapter = {name: tensor for name, tensor in arrived.items() if name.startswith(ADAPTER)}
    return {name: tensor for name, tensor in arrived.items() if name not in adapter}, adapter


def pair(causal: Any, arrived: Arrived) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a weight of a model and its new value.

    Args:
        causal: the Hugging Face model, perhaps with PEFT's layers inside.
        arrived: new values by name; one of several tied weights.

    Raises:
        ArgumentError: a weight is missing, unknown, or has another shape or dtype.
    """
    own = base_weights(causal)
    tied = ties(own)
    owner = {name: tied.get(name, name) for name in own}
    name_of_owner = {owner[name]: name for name in arrived if name in owner}
    _check_names(own, arrived, owner, name_of_owner)
    pairs = [(own[first], arrived[name]) for first, name in name_of_owner.items()]
    for (target, tensor), name in zip(pairs, name_of_owner.values(), strict=True):
        if target.shape != tensor.shape or not _alike(target, tensor):
            raise ArgumentError(
                f"receive_weights: {name} arrived as {tensor.dtype} {list(tensor.shape)}, the sampler has "
                f"{target.dtype} {list(target.shape)}; {_WAY}"
            )
    return pairs


@torch.no_grad()
def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy new values into the weights; they are rounded to the dtype of the weights."""
    for target, tensor in pairs:
        target.copy_(tensor)


_WAY = "create the sampler from the model that is trained (model_id=)"


def _check_names(
    own: Mapping[str, Tensor], arrived: Arrived, owner: Mapping[str, str], name_of_owner: Mapping[str, str]
) -> None:
    if strange := sorted(set(arrived) - set(own)):
        raise ArgumentError(f"receive_weights: {strange[0]} arrived, which the sampler does not have; {_WAY}")
    if missing := sorted(set(owner.values()) - set(name_of_owner)):
        raise ArgumentError(f"receive_weights: {missing[0]} did not arrive ({len(missing)} such weights); {_WAY}")
    if len(name_of_owner) < len(arrived):
        twice = next(name for name in arrived if name_of_owner[owner[name]] != name)
        raise ArgumentError(
            f"receive_weights: {twice} and {name_of_owner[owner[twice]]} arrived, which are one weight in the sampler; "
            f"{_WAY}"
        )


def _alike(target: Tensor, tensor: Tensor) -> bool:
    return target.dtype == tensor.dtype or (target.is_floating_point() and tensor.is_floating_point())

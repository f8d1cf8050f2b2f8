"""Adapters of a pool as PEFT's files: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from twinkle.errors import CheckpointError
from twinkle_transformers import adapters
from twinkle_transformers.pool.config import AdapterPlan
from twinkle_transformers.pool.tenants import Tenant, matrices_of
from twinkle_transformers.sites import Site
from twinkle_transformers.training_state import read_tensors


def weights_of(plan: AdapterPlan, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return copies of an adapter's matrices by PEFT's names."""
    return {name: view.clone(memory_format=torch.contiguous_format) for name, view in matrices_of(plan, flat.detach())}


def load_weights(tenant: Tenant, folder: Path, sites: Mapping[str, Site]) -> None:
    """Copy a saved adapter's weights into an adapter; names and shapes are compared before anything is copied.

    Args:
        tenant: the adapter.
        folder: of the saved one.
        sites: the model's layers, of which PEFT writes a copy beside an adapter on the output projection.

    Raises:
        CheckpointError: the file is missing or corrupt, or belongs to another model, rank or scale.
    """
    adapters.compare_configs(tenant.plan.config, adapters.read_config(folder), folder)
    flat = read_flat(tenant.plan, folder, sites)
    with torch.no_grad():
        tenant.flat.copy_(flat)


def read_flat(plan: AdapterPlan, folder: Path, sites: Mapping[str, Site]) -> torch.Tensor:
    """Return a saved adapter's weights in the layout of `plan`, float32 `[P]` on the CPU; see `load_weights`.

    Raises:
        CheckpointError: the file is missing or corrupt, or holds other matrices.
    """
    path = folder / adapters.WEIGHTS
    own = dict(matrices_of(plan, torch.empty(plan.layout.size, device="meta")))  # what it says may be beyond memory
    base = {f"base_model.model.{name}.base_layer.weight": site.module.weight for name, site in sites.items()}
    shapes = {key: shape for key, shape in shapes_in(path).items() if key not in base}
    for key in sorted(own.keys() | shapes.keys()):
        own_shape = list(own[key].shape) if key in own else None
        if own_shape != shapes.get(key):
            raise CheckpointError(
                f"the adapter in {folder} belongs to another model: {key} is {_shape(shapes.get(key))} in the file and "
                f"{_shape(own_shape)} in this model; load the base model that it was trained on"
            )
    flat = torch.zeros(plan.layout.size)
    own = dict(matrices_of(plan, flat))
    for key, tensor in read_tensors(path).items():
        if key in own and not tensor.is_floating_point():
            raise CheckpointError(f"the adapter in {folder} has {key} as {tensor.dtype}; weights are fractions")
        if key in own:
            own[key].copy_(tensor)
        elif not _is_copy(tensor, base[key]):
            raise CheckpointError(
                f"the adapter in {folder} comes with its own {key}, which differs from this model's; it was trained "
                "on another base model, or with one"
            )
    return flat


def _is_copy(tensor: torch.Tensor, weight: Any) -> bool:
    return tensor.shape == weight.shape and torch.equal(tensor, weight.detach().to("cpu", tensor.dtype))


def shapes_in(path: Path) -> Mapping[str, list[int]]:
    """Return the shapes of the tensors in a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    except Exception as error:  # safetensors raises its own type, a bare Exception in older versions
        raise CheckpointError(f"{path} cannot be read ({error}); the file is missing, truncated or corrupt") from error


def _shape(shape: Sequence[int] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"

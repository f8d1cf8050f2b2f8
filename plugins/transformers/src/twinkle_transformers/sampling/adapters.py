"""Adapter versions for sampling: read from PEFT's folders or a live model, and stacked for a step."""

import re
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from twinkle.digests import check_digests
from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle_transformers.adapters import CONFIG, WEIGHTS, read_config, tuned_places
from twinkle_transformers.lowrank.layout import AdapterVersion, Layout, Shape
from twinkle_transformers.patterns import value_at
from twinkle_transformers.pool.files import shapes_in
from twinkle_transformers.sites import Site, find_sites
from twinkle_transformers.training_state import read_tensors

_KEY = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])\.weight$")
_NUMBERS = count(1)  # makes keys of versions unique, independent of time stamps of folders
_BEYOND = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "target_parameters",
    "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config", "velora_config",
    "kasa_config", "monteclora_config",
)  # fmt: skip
"""Configuration fields of adapters that are not only low-rank terms of linear layers."""


def sites_of(model: Any) -> dict[str, Site]:
    """Return the layers that adapters may adapt, by their names without PEFT's wrappers.

    Args:
        model: the Hugging Face module, whose layers PEFT may have wrapped.
    """
    found = {}
    head = model.get_output_embeddings()
    inner = getattr(head, "base_layer", head)
    for name, site in find_sites(model).items():
        plain = name.replace(".base_layer", "")
        if ".lora_" in plain or ".modules_to_save" in plain:
            continue
        found[plain] = Site(plain, site.module, site.fan_in, site.fan_out, site.transposed, site.module is inner)
    if isinstance(inner, nn.Linear):
        name = next((name for name, module in model.named_modules() if module is inner), "").replace(".base_layer", "")
        found.setdefault(name, Site(name, inner, inner.in_features, inner.out_features, head=True))
    return found


def read_version(folder: Path, sites: Mapping[str, Site]) -> AdapterVersion:
    """Read a saved adapter.

    Args:
        folder: a folder in PEFT's format.
        sites: layers of the model.

    Raises:
        CheckpointError: the folder has no adapter, or one of another model.
        Unsupported: it is more than low-rank terms of linear layers.
    """
    check_digests(folder, (WEIGHTS, CONFIG))
    config, what = read_config(folder), f"the adapter in {folder}"
    check_config(config, what)
    path = folder / WEIGHTS
    names, layout = lay_out(shapes_in(path), config, sites, what)
    flat = flatten(layout, pairs_of(read_tensors(path), names))
    device = next(next(iter(sites.values())).module.parameters()).device
    return AdapterVersion(layout, flat.to(device), f"{path.resolve()}@{next(_NUMBERS)}")


def arrived_version(
    tensors: Mapping[str, Tensor], config: Any, sites: Mapping[str, Site], what: str, spare: "Spare"
) -> AdapterVersion:
    """Return an adapter version from tensors, which are copied.

    Args:
        tensors: A and B by PEFT's names.
        config: its configuration.
        sites: layers of the model.
        what: name of the adapter in errors.
        spare: buffers of earlier versions to reuse.

    Raises:
        CheckpointError: it belongs to another model.
        Unsupported: it is more than low-rank terms of linear layers.
    """
    check_config(config, what)
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    names, layout = lay_out(shapes, config, sites, what, as_given=True)
    return spare.version(layout, pairs_of(tensors, names), f"{what}@{next(_NUMBERS)}")


def check_config(config: Any, what: str) -> None:
    """Refuse a configuration that is not only low-rank terms of linear layers."""
    if not isinstance(config, LoraConfig):
        raise Unsupported(f"{what} is not a LoRA but {type(config).__name__}")
    if beyond := [name for name in _BEYOND if getattr(config, name, None)] or ["bias"] * (config.bias != "none"):
        raise Unsupported(f"{what} has {', '.join(beyond)}")


def lay_out(
    shapes: Mapping[str, list[int]], config: LoraConfig, sites: Mapping[str, Site], what: str, as_given: bool = False
) -> tuple[list[str], Layout]:
    """Return the layers that an adapter adapts, and the layout of its matrices."""
    names = _names(shapes, what)
    found = [(name, _shape(name, shapes, sites, config, what)) for name in names]
    return names, Layout.of(found, as_given=as_given)


def pairs_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    """Return A and B of each layer."""
    return [(tensors[_key(name, "A")], tensors[_key(name, "B")]) for name in names]


class Spare:
    """Buffers of released versions, for reuse by versions of the same layout.

    On a CPU, allocating new memory costs more than copying the weights into it.
    """

    def __init__(self, kept: int = 2) -> None:
        """Keep a number of the most recently released buffers."""
        self._free: deque[tuple[Layout, Tensor]] = deque(maxlen=kept)

    def take(self, layout: Layout, device: torch.device) -> Tensor:
        """Return `[P]` float32, 0 between the matrices."""
        for _ in range(len(self._free)):
            with suppress(IndexError):  # another thread was faster
                known, flat = self._free.popleft()
                if known is layout and flat.device == device:
                    return flat
        return torch.zeros(layout.size, dtype=torch.float32, device=device)

    def version(self, layout: Layout, pairs: Sequence[tuple[Tensor, Tensor]], key: str) -> AdapterVersion:
        """Return a copy of all matrices as a version, whose buffer is reused after its release; see `flatten`."""
        version = AdapterVersion(layout, flatten(layout, pairs, self.take(layout, pairs[0][0].device)), key)
        if version.flat.device.type == "cpu":
            weakref.finalize(version, self._free.append, (layout, version.flat)).atexit = False
        return version


def flatten(layout: Layout, pairs: Sequence[tuple[Tensor, Tensor]], flat: Tensor | None = None) -> Tensor:
    """Return one buffer `[P]` with a copy of all matrices, float32.

    Args:
        layout: layout of the buffer.
        pairs: A `[r, in]` and B `[out, r]` of each entry, in the layout's order.
        flat: the buffer to use; by default a new one.
    """
    if flat is None:
        flat = torch.zeros(layout.size, dtype=torch.float32, device=pairs[0][0].device)
    targets, sources = [], []
    for entry, (down, up) in zip(layout.entries.values(), pairs, strict=True):
        targets += [entry.down_of(flat), entry.up_of(flat)]
        sources += [down.detach(), up.detach().t()]
    torch._foreach_copy_(targets, sources)
    return flat


def _names(shapes: Mapping[str, list[int]], what: str) -> list[str]:
    found: dict[str, set[str]] = {}
    for key in shapes:
        match = _KEY.match(key)
        if match is None:
            raise Unsupported(f"{what} has {key}, which is not a low-rank term of a linear layer")
        found.setdefault(match[1], set()).add(match[2])
    if half := sorted(name for name, kinds in found.items() if len(kinds) != 2):
        raise CheckpointError(f"{what} has one of the two matrices of {half[0]}; the file is damaged")
    if not found:
        raise CheckpointError(f"{what} has no weights")
    return sorted(found)


def _shape(
    name: str, shapes: Mapping[str, list[int]], sites: Mapping[str, Site], config: LoraConfig, what: str
) -> Shape:
    site = sites.get(name)
    down, up = shapes[_key(name, "A")], shapes[_key(name, "B")]
    rank = down[0]
    for key, shape, wanted in (
        (_key(name, "A"), down, None if site is None else [rank, site.fan_in]),
        (_key(name, "B"), up, None if site is None else [site.fan_out, rank]),
    ):
        if shape != wanted:
            mine = "absent" if wanted is None else f"of shape {wanted}"
            raise CheckpointError(
                f"{what} belongs to another model: {key} is of shape {shape} there and {mine} in this model; load the "
                "base model that it was trained on"
            )
    alpha = value_at(config.alpha_pattern or {}, name, config.lora_alpha)
    return Shape(rank, down[1], up[0], alpha / (rank**0.5 if config.use_rslora else rank))


def _key(name: str, matrix: str) -> str:
    return f"base_model.model.{name}.lora_{matrix}.weight"


class LiveAdapters:
    """Copies adapters of a live module with PEFT layers, once for each state of their weights."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[tuple[Any, ...], AdapterVersion]] = {}
        self._spare = Spare()

    def version(self, model: PeftModel, name: str) -> AdapterVersion:
        """Return the present version of an adapter.

        Args:
            model: the wrapped module.
            name: name of the adapter.

        Raises:
            Unsupported: it is more than low-rank terms of linear layers.
        """
        layers = _layers(model, name)
        weights = [(layer.lora_A[name].weight, layer.lora_B[name].weight) for _, layer in layers]
        written = tuple((w.data_ptr(), w._version) for pair in weights for w in pair)
        state = written, tuple(layer.scaling[name] for _, layer in layers)
        known = self._versions.get(name)
        if known is not None and known[0] == state:
            return known[1]
        shapes = [
            (place, Shape(down.shape[0], down.shape[1], up.shape[0], float(layer.scaling[name])))
            for (place, layer), (down, up) in zip(layers, weights, strict=True)
        ]
        layout = Layout.of(shapes, as_given=True)
        version = self._spare.version(layout, weights, f"{name}@{next(_NUMBERS)}")
        self._versions[name] = state, version
        return version


def _layers(model: PeftModel, name: str) -> list[tuple[str, LoraLayer]]:
    found: list[tuple[str, LoraLayer]] = []
    for place, module in tuned_places(model.get_base_model()):
        if isinstance(module, ModulesToSaveWrapper) and name in module.modules_to_save:
            raise Unsupported(f"adapter {name!r} has a {place} of its own")
        if not isinstance(module, BaseTunerLayer) or not _has(module, name):
            continue
        if type(module).__name__ != "Linear" or not isinstance(module, LoraLayer):
            raise Unsupported(f"adapter {name!r} adapts {place}, a {type(module).__name__}")
        if name in module.lora_variant or module.lora_bias.get(name) or module.merged:
            raise Unsupported(f"adapter {name!r} is more than a low-rank term at {place}, or is merged into it")
        found.append((place, module))
    if not found:
        raise ArgumentError(f"adapter {name!r} has no weights in this model")
    return found


def _has(module: Any, name: str) -> bool:
    return any(name in getattr(module, kind, ()) for kind in module.adapter_layer_names)


class Banks:
    """Stacked weights of several versions, cached for the next steps."""

    def __init__(self, kept: int = 4) -> None:
        """Keep a number of the most recently used stacks."""
        self._kept = kept
        self._stacks: dict[tuple[str | torch.dtype, ...], Tensor] = {}

    def of(self, versions: Iterable[AdapterVersion], dtype: torch.dtype) -> Tensor:
        """Return the versions' weights `[n, P]`."""
        versions = list(versions)
        key: tuple[str | torch.dtype, ...] = (dtype, *(version.key for version in versions))
        found = self._stacks.pop(key, None)
        if found is None:
            flats = [version.flat for version in versions]
            found = torch.empty(len(flats), flats[0].numel(), dtype=dtype, device=flats[0].device)
            torch._foreach_copy_(list(found.unbind()), flats)
        self._stacks[key] = found
        while len(self._stacks) > self._kept:
            del self._stacks[next(iter(self._stacks))]
        return found

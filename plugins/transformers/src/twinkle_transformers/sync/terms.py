"""The changes of an adapter to its base model, as low-rank terms; and the weights of the base by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle_transformers.adapters import tuned_places
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.sites import Site

_WRAPPERS = (".base_layer", ".original_module")
_ADAPTERS = (".lora_", ".modules_to_save.", ".trainable_tokens")


def plain(path: str) -> str:
    """Return the path of a layer or weight without PEFT's wrappers."""
    for wrapper in _WRAPPERS:
        path = path.replace(f"{wrapper}.", ".").removesuffix(wrapper)
    return path


def base_weights(causal: Any) -> dict[str, Tensor]:
    """Return parameters and saved buffers of a Hugging Face model without adapters; tied weights under each name."""
    state: Mapping[str, Tensor] = causal.state_dict(keep_vars=True)
    return {plain(key): tensor for key, tensor in state.items() if not any(part in key for part in _ADAPTERS)}


def ties(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each tied weight, by its other names."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in weights.items() if first.setdefault(id(t), name) != name}


@dataclass(frozen=True, slots=True)
class Term:
    """The term scale * B A that an adapter adds to one weight W `[out, in]`.

    Attributes:
        down: A, `[r, in]`.
        up: B, `[out, r]`.
        scale: factor of the product.
        transposed: the shape of the weight is `[in, out]` (GPT-2's layers, embeddings).
        magnitude: magnitudes of DoRA (arXiv:2402.09353), `[out]`: the length of each row of the sum; None without DoRA.
        bias: scaled term of the layer's bias, `[out]`.
    """

    down: Tensor
    up: Tensor
    scale: float
    transposed: bool = False
    magnitude: Tensor | None = None
    bias: Tensor | None = None

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return W + scale * B A in W's dtype, computed in float32 or wider; with DoRA its rows have `magnitude`."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        base = (weight.t() if self.transposed else weight).to(dtype)
        merged = torch.addmm(base, self.up.to(dtype), self.down.to(dtype), alpha=self.scale)
        if self.magnitude is not None:
            merged *= (self.magnitude.to(dtype) / merged.norm(dim=1))[:, None]
        return (merged.t() if self.transposed else merged).to(weight.dtype)


@dataclass(slots=True)
class Changes:
    """All changes of an adapter.

    Attributes:
        terms: low-rank terms by the name of the layer without PEFT's wrappers.
        weights: replacements of weights of the base by name.
        beyond: description of changes other than low-rank terms of linear layers; None without such changes.
    """

    terms: dict[str, Term] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    beyond: str | None = None

    def adapted(self, base: Mapping[str, Tensor]) -> dict[str, Tensor | Term]:
        """Return the replacement or term of each changed weight, by its name in the base."""
        weights: dict[str, Tensor | Term] = dict(self.weights)
        for place, term in self.terms.items():
            weights[f"{place}.weight"] = term
            if term.bias is not None:
                weights[f"{place}.bias"] = base[f"{place}.bias"].detach() + term.bias
        return weights


def changes_of(model: PeftModel, name: str) -> Changes:
    """Return the changes of an adapter of a module that PEFT wraps.

    Args:
        model: the wrapped module.
        name: name of the adapter.

    Raises:
        Unsupported: the adapter changes more than weights of layers, or in an unknown way.
    """
    changes = Changes()
    for place, module in tuned_places(model.get_base_model()):
        if isinstance(module, AuxiliaryTrainingWrapper):
            _add_saved(changes, place, module, name)
        elif isinstance(module, BaseTunerLayer) and _holds(module, name):
            changes.terms[place] = term = _term(place, module, name)
            if term.magnitude is not None or term.bias is not None or _kind(module) == "Embedding":
                changes.beyond = changes.beyond or f"more than a low-rank term at {place}"
    if not changes.terms and not changes.weights:
        raise ArgumentError(f"adapter {name!r} has no weights in this model")
    return changes


def terms_of(version: AdapterVersion, sites: Mapping[str, Site]) -> dict[str, Term]:
    """Return the terms that a version of a pool's adapter adds to linear layers."""
    terms = {}
    for name, shape in version.layout.shapes.items():
        entry = version.layout.entries[name]
        down, up = entry.down_of(version.flat)[: shape.rank], entry.up_of(version.flat)[: shape.rank]
        terms[name] = Term(down, up.t(), shape.scale, sites[name].transposed)
    return terms


def _add_saved(changes: Changes, place: str, module: Any, name: str) -> None:
    """Add a fully trained module (`modules_to_save`) to the changes."""
    if isinstance(module, ModulesToSaveWrapper):
        if name in module.modules_to_save:
            trained = module.modules_to_save[name].state_dict(keep_vars=True)
            changes.weights |= {f"{place}.{key}": tensor.detach() for key, tensor in trained.items()}
            changes.beyond = changes.beyond or f"a {place} of its own"
    elif name in getattr(module, "trainable_tokens_delta", ()):
        raise Unsupported(
            f"adapter {name!r} trains single tokens of {place} ({type(module).__name__}); save it and sample from the "
            "folder"
        )


def _kind(layer: object) -> str:
    return type(layer).__name__


def _term(place: str, layer: Any, name: str) -> Term:
    kind, variant = _kind(layer), type(layer.lora_variant.get(name)).__name__
    if kind not in ("Linear", "Embedding") or not isinstance(layer, LoraLayer):
        raise Unsupported(f"adapter {name!r} adapts {place}, a {kind}, which cannot be merged or sent")
    if layer.merged:
        raise Unsupported(f"adapter {name!r} is already merged into {place}; unmerge it first")
    if variant not in ("NoneType", "DoraLinearVariant"):
        raise Unsupported(f"adapter {name!r} is a {variant} at {place}, which cannot be merged or sent")
    if kind == "Embedding":
        down, up = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
        return Term(down.detach(), up.detach(), float(layer.scaling[name]), transposed=True)
    # Read from `_modules`: attribute access of some thousand modules takes longer than copying the adapter.
    a, b = (layer._modules[matrix]._modules[name]._parameters for matrix in ("lora_A", "lora_B"))
    down, up, bias, scale = a["weight"], b["weight"], b["bias"], float(layer.scaling[name])
    if bias is not None and variant != "NoneType":
        raise Unsupported(f"adapter {name!r} is a DoRA with lora_bias at {place}, which cannot be merged")
    if bias is not None and layer.get_base_layer().bias is None:
        raise Unsupported(f"adapter {name!r} has a bias at {place}, where the base has none to merge it into")
    return Term(
        down.detach(),
        up.detach(),
        scale,
        bool(layer.fan_in_fan_out),
        layer.lora_magnitude_vector[name].weight.detach() if variant != "NoneType" else None,
        None if bias is None else bias.detach() * scale,
    )


def _holds(module: Any, name: str) -> bool:
    parts = module._modules
    return any(name in (parts[k] if k in parts else getattr(module, k, ())) for k in module.adapter_layer_names)

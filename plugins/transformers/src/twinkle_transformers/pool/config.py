"""What a LoRA configuration means for one model: which layers, at which rank and scale."""

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle_registry import check_keywords
from twinkle_transformers.first_weights import draw_down, generator_of
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.memory import host_zeros
from twinkle_transformers.patterns import check_patterns, settle_order, value_at
from twinkle_transformers.sites import ExpertSite, Site, as_peft_reads, match_experts

ATTENTION = frozenset({"self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer"})
"""Names of the modules of a decoder layer that mix tokens; its other modules are its MLP."""

_OWN = ("seed", "train_attn", "train_mlp", "train_unembed")
_HONOURED = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "rank_pattern",
        "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights", "target_parameters",
        # the fields below do not affect the weights
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "runtime_config", "fan_in_fan_out", "ephemeral_gpu_offload",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A configuration resolved for one model.

    Attributes:
        config: the configuration for PEFT's files.
        layout: offsets of the matrices in the adapter's vector.
        dropout: dropout probability.
        init: "kaiming" (B is 0), "gaussian" (B is 0) or "random" (B is not).
        experts: the parameters of experts that it adapts, by name.
        seed: seed in the configuration, if given.
    """

    config: LoraConfig
    layout: Layout
    dropout: float
    init: str
    experts: Mapping[str, ExpertSite]
    seed: int | None = None


def read_config(
    name: str,
    config: Any,
    sites: Mapping[str, Site],
    model: Any,
    *,
    experts: Mapping[str, ExpertSite] | None = None,
    rank_multiple: int = 1,
    saved: bool = False,
) -> AdapterPlan:
    """Read a configuration.

    Args:
        name: of the adapter, for errors.
        config: a `LoraConfig`, or a mapping of its fields and of `seed`, `train_attn`, `train_mlp`, `train_unembed`
            (Tinker's words; without them `target_modules` says it).
        sites: the layers that adapters may adapt.
        model: the Hugging Face module.
        experts: the parameters of experts that adapters may adapt.
        rank_multiple: see `Layout.of`.
        saved: whether it is that of saved files, whose patterns may name layers that they do not adapt.

    Raises:
        ArgumentError: a value is invalid, or no layer matches.
        Unsupported: a pool does not support a field.
    """
    own: dict[str, Any] = {}
    if isinstance(config, Mapping):
        own = {key: config[key] for key in _OWN if key in config}
        given = {key: value for key, value in config.items() if key not in _OWN}
        check_keywords(LoraConfig, given, what=f"adapter {name!r}")
        try:
            config = LoraConfig(**given)
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"adapter {name!r}: PEFT refuses the configuration: {error}") from error
    if not isinstance(config, LoraConfig):
        raise Unsupported(
            f"adapter {name!r}: {type(config).__name__} is not supported; give a peft.LoraConfig, a dict of its "
            "fields, or the folder of a saved LoRA adapter"
        )
    config = copy.deepcopy(config)
    _check(name, config)
    if any(key in own for key in _OWN[1:]):
        _by_family(name, config, own, sites, experts or {}, model)
    elif config.target_modules == "all-linear":
        _everywhere(config, sites, experts or {}, model)
    config = as_peft_reads(config, model)
    adapted_experts = {key: (experts or {})[key] for key in match_experts(name, config, experts or {}, model)}
    adapted = [*_targets(name, config, sites, model), *adapted_experts]
    check_patterns(name, config, None if saved else adapted)
    settle_order(config, adapted)
    shapes = [(key, _shape(config, adapted_experts.get(key) or sites[key])) for key in adapted]
    init = {True: "kaiming", False: "random"}.get(config.init_lora_weights, "gaussian")
    seed = own.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ArgumentError(f"adapter {name!r}: seed must be an integer, got {seed!r}")
    layout = Layout.of(shapes, rank_multiple=rank_multiple)
    return AdapterPlan(config, layout, float(config.lora_dropout), str(init), adapted_experts, seed)


def first_weights(plan: AdapterPlan, seed: int, device: torch.device) -> Tensor:
    """Return the weights of a new adapter, float32 `[P]`: those of a layer are a function of its shape and the seed.

    A has PEFT's distribution, see `draw_down`; B is 0, or uniform in `+-1/sqrt(rank)` ("random").
    """
    flat = host_zeros(plan.layout.size)
    for name, entry in plan.layout.entries.items():
        shape, draw = plan.layout.shapes[name], generator_of(seed, name)
        draw_down(entry.down_of(flat)[..., : shape.rank, :], draw, gaussian=plan.init == "gaussian")
        if plan.init == "random":
            bound = (shape.rank * max(1, shape.experts)) ** -0.5
            entry.up_of(flat)[..., : shape.rank, :].uniform_(-bound, bound, generator=draw)
    return flat.to(device)


def _check(name: str, config: LoraConfig) -> None:
    if isinstance(config.r, bool) or not isinstance(config.r, int) or config.r < 1:
        raise ArgumentError(f"adapter {name!r}: rank r must be an integer of at least 1, got {config.r!r}")
    if not 0.0 <= config.lora_dropout < 1.0:
        raise ArgumentError(f"adapter {name!r}: lora_dropout must be in [0, 1), got {config.lora_dropout!r}")
    if not isinstance(config.lora_alpha, int | float) or not math.isfinite(config.lora_alpha):
        raise ArgumentError(f"adapter {name!r}: lora_alpha must be a finite number, got {config.lora_alpha!r}")
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise Unsupported(
            f"adapter {name!r}: init_lora_weights={config.init_lora_weights!r} reads or changes the base model, which "
            "many share; choose True, False or 'gaussian'"
        )
    plain = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _HONOURED and value and value != getattr(plain, field.name):
            raise Unsupported(
                f"adapter {name!r}: {field.name}={value!r} is not supported where many adapters share one base model; "
                "leave it out, or train it alone with TransformersModel"
            )


def _targets(name: str, config: LoraConfig, sites: Mapping[str, Site], model: Any) -> list[str]:
    if config.target_modules is None and not config.target_parameters:
        kind = model.config.get_text_config().model_type
        known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
        if known is None:
            raise ArgumentError(
                f"adapter {name!r}: PEFT has no default target_modules for {kind!r}; give some, such as 'all-linear'"
            )
        config.target_modules = set(known)
    matched = [key for key in sites if _matches(config, key)]
    for key in matched:
        if refusal := _peft_refuses(config, model, key):
            raise ArgumentError(f"adapter {name!r}: {refusal}")
    for key, module in model.named_modules():
        if key not in sites and hasattr(module, "weight") and _matches(config, key):
            raise Unsupported(
                f"adapter {name!r}: its targets match {key}, a {type(module).__name__}; a pool adapts only linear "
                f"layers of the text decoder, such as {next(iter(sites))}"
            )
    if not matched and not config.target_parameters:
        raise ArgumentError(
            f"adapter {name!r}: target_modules={config.target_modules!r} matches no layer of "
            f"{type(model).__name__}; its layers are {', '.join(sorted({key.rpartition('.')[2] for key in sites}))}"
        )
    return matched


def _everywhere(config: LoraConfig, sites: Mapping[str, Site], experts: Mapping[str, ExpertSite], model: Any) -> None:
    """Replace "all-linear" in a configuration by the layers that PEFT adapts: all but head and routers.

    Where PEFT converts names of layers to names of experts, layers that still have such a name are excluded too.
    """
    read = as_peft_reads(config, model)
    names = [key for key, site in sites.items() if not (site.head or site.router or _peft_refuses(config, model, key))]
    if read.target_modules != config.target_modules:
        names = [key for key in names if key.rpartition(".")[2] in read.target_modules]
        wanted = sorted({".".join(key.rsplit(".", 2)[-2:]) for key in experts})
        config.target_parameters = [key for key in wanted if key.rpartition(".")[2] in read.target_parameters] or None
        if config.target_parameters:
            config.rank_pattern, config.alpha_pattern = read.rank_pattern, read.alpha_pattern
    config.target_modules = _shortest(names, model)


def _peft_refuses(config: LoraConfig, model: Any, key: str) -> str | None:
    """Return why PEFT refuses an adapter on a layer: Mamba's kernels read some weights without calling the layer."""
    try:
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check
    except ImportError:
        return None
    try:
        check(config, model, key.rpartition(".")[2])
    except ValueError as error:
        return str(error)
    return None


def _by_family(
    name: str,
    config: LoraConfig,
    own: Mapping[str, Any],
    sites: Mapping[str, Site],
    experts: Mapping[str, ExpertSite],
    model: Any,
) -> None:
    """Replace `train_attn`, `train_mlp` and `train_unembed` by target modules in a configuration."""
    if config.target_modules is not None:
        raise ArgumentError(
            f"adapter {name!r}: give target_modules, or train_attn, train_mlp and train_unembed, but not both"
        )
    wanted = {family: own.get(f"train_{family}", True) for family in ("attn", "mlp", "unembed")}
    names = [key for key, site in sites.items() if wanted[_family(key, site)] and not site.router]
    names = [key for key in names if not _peft_refuses(config, model, key)]
    if not names and not (wanted["mlp"] and experts):
        raise ArgumentError(f"adapter {name!r}: at least one of train_attn, train_mlp and train_unembed must be True")
    config.target_modules = _shortest(names, model)
    if wanted["mlp"] and experts:
        config.target_parameters = sorted({".".join(key.rsplit(".", 2)[-2:]) for key in experts})


def _family(key: str, site: Site) -> str:
    if site.head:
        return "unembed"
    return "attn" if ATTENTION & set(key.split(".")) else "mlp"


def _shortest(names: list[str], model: Any) -> set[str]:
    """Return the last names of layers if these match no other module of the model, else the full names."""
    wanted = set(names)
    last = {key.rpartition(".")[2] for key in names}
    others = {key.rpartition(".")[2] for key, _ in model.named_modules() if key not in wanted}
    return wanted if last & others else last


def _matches(config: LoraConfig, key: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unrelated advice of PEFT
        return bool(config.target_modules) and bool(check_target_module_exists(config, key))


def _shape(config: LoraConfig, site: Site | ExpertSite) -> Shape:
    rank = value_at(config.rank_pattern, site.name, config.r)
    alpha = value_at(config.alpha_pattern, site.name, config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    return Shape(rank, site.fan_in, site.fan_out, float(scale), getattr(site, "experts", 0))

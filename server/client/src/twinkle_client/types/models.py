"""How a model is created."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from twinkle_client.types.base import Metadata, Name, Number, Request, Seed, Text


class LoraConfig(Request):
    """The adapter of a Tinker model: rank, and what is trained."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    train_unembed: bool = False
    train_mlp: bool = True
    train_attn: bool = True


_ATOM = r"(?:[A-Za-z0-9_-]|\\?\.|\\d|\[(?:[0-9](?:-[0-9])?)+\]|\([A-Za-z0-9_]+(?:\|[A-Za-z0-9_]+)*\))"
_REPEATED = r"(?:\.|\\d|\[(?:[0-9](?:-[0-9])?)+\])[*+]"
LayerPattern = Annotated[str, Field(min_length=1, max_length=256, pattern=rf"^\^?{_ATOM}*(?:{_REPEATED}{_ATOM}*)?$")]
"""A regular expression for the end of a layer's path, which a hostile client cannot make slow.

It consists of names, dots, digits (`\\d`, `[0-9]`), alternatives such as `(q_proj|v_proj)`, and at most one repetition
such as `.*` or `\\d+`.
"""


_PATH: Final = re.compile(rf"\^?{_ATOM}*(?:{_REPEATED}{_ATOM}*){{0,2}}\$?")


def _checked_path(pattern: str) -> str:
    """Return a regular expression for whole paths of layers, if matching it takes little time.

    Raises:
        ValueError: it has other parts than `LayerPattern`, or more than two repetitions.
    """
    if not _PATH.fullmatch(pattern):
        raise ValueError(
            "a regular expression for paths of layers must consist of names, dots, digits (\\d, [0-9]), alternatives "
            "such as (q_proj|v_proj), and at most two repetitions such as .* or \\d+; a list of names is accepted, too"
        )
    return pattern


PathPattern = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_checked_path)]
"""A regular expression for the whole path of a layer, as `peft.LoraConfig` has it in place of a list of names."""
Layers = Annotated[list[Name], Field(min_length=1, max_length=256)]


class LayerPatterns(Request):
    """Ranks and scales of single layers, as `peft.LoraConfig` has them: the first key that matches a layer counts.

    Attributes:
        rank_pattern: rank of the layers that a key matches, in place of `r`.
        alpha_pattern: `lora_alpha` of the layers that a key matches.
    """

    rank_pattern: dict[LayerPattern, Annotated[int, Field(ge=1, le=1024)]] = Field(default_factory=dict, max_length=512)
    alpha_pattern: dict[LayerPattern, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=512
    )


class AdapterConfig(LayerPatterns):
    """The fields of `peft.LoraConfig` that adapters on a shared base model have; the defaults are PEFT's.

    Attributes:
        r: rank of every pair of matrices that `rank_pattern` does not name.
        lora_alpha: the low-rank term is scaled by `lora_alpha` divided by the rank.
        lora_dropout: probability, applied to the input of the low-rank term.
        target_modules: "all-linear", last names of layers, or a regular expression for their whole paths; None is
            PEFT's choice for this model.
        exclude_modules: layers of `target_modules` that are not adapted: last names, or a regular expression.
        use_rslora: the low-rank term is scaled by `lora_alpha` divided by the square root of the rank.
        init_lora_weights: False makes both matrices random; with True and "gaussian" an adapter changes nothing at
            first.
        train_attn: adapt the projections of attention; this and the next two select layers in place of
            `target_modules`.
        train_mlp: adapt the MLPs.
        train_unembed: adapt the output projection.
    """

    r: Annotated[int, Field(ge=1, le=1024)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8.0
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    target_modules: PathPattern | Layers | None = None  # "all-linear" is a text, too
    exclude_modules: PathPattern | Layers | None = None
    use_rslora: bool = False
    init_lora_weights: bool | Literal["gaussian"] = True
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


class CreateModelRequest(Request):
    """A new model.

    Attributes:
        session_id: of the client.
        model_seq_id: number of the model in its session, which identifies a retry.
        base_model: name of the served model; None is the one that is served.
        config: of the adapter; None with a checkpoint.
        checkpoint: a `twinkle://` path whose adapter is loaded.
        load_optimizer: load the optimizer, too.
        gradient_accumulation_steps: number of backward calls for each step.
        seed: of the first weights and of dropout; None draws one.
        user_metadata: kept with the training run.
        full_parameters: train all parameters of the base model instead of an adapter, where the operator allows it;
            the service is then reserved for this key.
    """

    session_id: Name
    model_seq_id: Number
    base_model: Text | None = None
    config: AdapterConfig | None = None
    checkpoint: Text | None = None
    load_optimizer: bool = False
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=2**20)] = 1
    seed: Seed | None = None
    user_metadata: Metadata | None = None
    full_parameters: bool = False


def plain_config(config: Any) -> dict[str, Any]:
    """Return a `peft.LoraConfig`, or a mapping of its fields, as fields of `AdapterConfig` that differ from PEFT's.

    Fields that have PEFT's default, or that do not affect the weights, are left out. All others are sent, so that the
    service can refuse those that it does not support.
    """
    defaults = _DEFAULTS if isinstance(config, Mapping) else vars(type(config)())
    fields = dict(config) if isinstance(config, Mapping) else dict(vars(config))
    return {
        name: sorted(value) if isinstance(value, set | frozenset) else value
        for name, value in fields.items()
        if name not in _WITHOUT_EFFECT and not (name in defaults and value == defaults[name])
    }


_WITHOUT_EFFECT: Final = frozenset(
    {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "runtime_config",
    }
)  # fmt: skip
"""Fields of `peft.LoraConfig` that do not affect the weights."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "alora_invocation_tokens": None, "arrow_config": None, "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "kasa_config": None, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None, "qalora_group_size": 16,
    "target_modules": None, "target_parameters": None, "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "velora_config": None, "_custom_modules": None,
}  # fmt: skip
"""Defaults of `peft.LoraConfig`, whose `to_dict()` has all fields; this package does not depend on PEFT."""

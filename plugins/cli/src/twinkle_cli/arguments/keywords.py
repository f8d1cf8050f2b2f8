"""Converts a group of arguments to keyword arguments of a constructor; arguments that would be ignored are errors."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from twinkle.errors import ArgumentError

if TYPE_CHECKING:
    from twinkle_cli.arguments.args import Args

_TRANSFORMERS = ("model_cls", "mixed_precision", "strategy", "memory_efficient_init", "gradient_checkpointing",
                 "trust_remote_code", "ddp_config", "fsdp_config", "grad_scaler_config")  # fmt: skip
_MEGATRON = ("mixed_precision", "load_weights", "recompute_granularity", "recompute_method", "recompute_num_layers",
             "recompute_modules", "use_distributed_optimizer", "variable_seq_lengths", "ddp_config")  # fmt: skip
_OF_SCRIPT = {
    "model": ("enable_liger", "enable_fused_ce"),
    "lora": ("use_lora", "adapter_name", "lora_path"),
    "dataset": ("streaming",),
    "template": ("template_cls",),
    "optimizer": ("optimizer_cls", "max_grad_norm"),
    "scheduler": ("scheduler_cls",),
    "loss": ("loss_cls",),
    "sampler": ("sampler_type",),
}


def model(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of the model class of `strategy`."""
    megatron = args.model.use_megatron
    keywords = {"model_id": args.model.model_id or args.template.model_id}
    accepted = _MEGATRON if megatron else _TRANSFORMERS
    keywords |= {name: getattr(args.model, name) for name in accepted}
    if megatron and args.model.tokenizer_id is not None:
        keywords["tokenizer_id"] = args.model.tokenizer_id
    # Without Megatron, the tokenizer belongs to the template; `template` passes it on.
    used = (*accepted, "model_id", "tokenizer_id", "strategy")
    other = "set use_megatron for MegatronModel" if not megatron else "TransformersModel takes it"
    _refuse_others(args, "model", used, "MegatronModel" if megatron else "TransformersModel", other)
    return keywords


def lora(args: "Args") -> dict[str, Any]:
    """Return fields of `peft.LoraConfig`."""
    return {
        "target_modules": args.lora.lora_target_modules or "all-linear",
        "r": args.lora.lora_r,
        "lora_alpha": args.lora.lora_alpha,
        "lora_dropout": args.lora.lora_dropout,
    }


def dataset(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of `Dataset`."""
    from twinkle.dataset import DatasetMeta

    group = args.dataset
    meta = DatasetMeta(group.dataset_id, group.subset_name, group.split, _rows(group.data_slice))
    options = {"num_proc": group.num_proc, "revision": group.revision}
    return {"dataset_meta": meta} | {name: value for name, value in options.items() if value is not None}


def template(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of `Template`."""
    names = ("max_length", "truncation_strategy", "use_chat_template", "enable_thinking", "default_system")
    model_id = args.template.model_id or args.model.tokenizer_id or args.model.model_id
    return {"model_id": model_id or ""} | {name: getattr(args.template, name) for name in names}


def optimizer(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of the optimizer's constructor."""
    group = args.optimizer
    if args.model.use_megatron:
        adam = {"adam_beta1": "adam_beta1", "adam_beta2": "adam_beta2", "adam_epsilon": "adam_eps"}
        keywords: dict[str, Any] = {"lr": group.lr, "weight_decay": group.weight_decay}
        return keywords | {key: getattr(group, name) for name, key in adam.items() if args.is_set(f"optimizer.{name}")}
    cls, accepted = _constructor(group.optimizer_cls, "optimizer")
    keywords = {"lr": group.lr}
    used = ["learning_rate"]
    if "weight_decay" in accepted:
        keywords["weight_decay"] = group.weight_decay
        used.append("weight_decay")
    if "betas" in accepted:
        keywords["betas"] = (group.adam_beta1, group.adam_beta2)
        used += ["adam_beta1", "adam_beta2"]
        if "eps" in accepted:
            keywords["eps"] = group.adam_epsilon
            used.append("adam_epsilon")
    _refuse_others(args, "optimizer", used, cls, f"it takes {_listed(accepted)}")
    return keywords


def scheduler(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of the scheduler's constructor."""
    group = args.scheduler
    steps = group.num_training_steps if group.num_training_steps is not None else args.training.max_steps
    if args.model.use_megatron:
        decay = group.lr_decay_steps if group.lr_decay_steps is not None else steps
        lr = group.max_lr if group.max_lr is not None else args.optimizer.lr
        used = ["lr_decay_steps", "max_lr", "num_warmup_steps", "num_training_steps"]
        _refuse_others(args, "scheduler", used, "Megatron's scheduler", "leave it out")
        return {"lr_decay_steps": decay, "max_lr": lr, "lr_warmup_steps": group.num_warmup_steps}
    cls, accepted = _constructor(group.scheduler_cls, "scheduler")
    lowest_at = ("t_max", group.t_max) if group.t_max is not None else ("num_training_steps", steps)
    sources = {
        "T_max": lowest_at,
        "total_steps": ("num_training_steps", steps),
        "num_training_steps": ("num_training_steps", steps),
        "num_warmup_steps": ("num_warmup_steps", group.num_warmup_steps),
        "eta_min": ("eta_min", group.eta_min),
        "max_lr": ("max_lr", group.max_lr),
    }
    matching = {keyword: source for keyword, source in sources.items() if keyword in accepted}
    _refuse_others(args, "scheduler", [name for name, _ in matching.values()], cls, f"it takes {_listed(accepted)}")
    return {keyword: value for keyword, (_, value) in matching.items() if value is not None}


def loss(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of the loss's constructor."""
    cls, accepted = _constructor(args.loss.loss_cls, "loss")
    used = [field.name for field in fields(args.loss) if field.name in accepted]
    _refuse_others(args, "loss", used, cls, f"it takes {_listed(accepted)}")
    return {name: getattr(args.loss, name) for name in used}


def sampler(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of the sampler."""
    keywords: dict[str, Any] = {"model_id": args.model.model_id or args.template.model_id}
    names = [field.name for field in fields(args.sampler) if field.name != "sampler_type"]
    if args.sampler.sampler_type.rpartition("/")[2] != "vLLMSampler":
        _refuse_others(args, "sampler", (), args.sampler.sampler_type, "only vLLMSampler does")
        return keywords
    engine = {name: value for name in names if (value := getattr(args.sampler, name)) is not None}
    return keywords | {"engine_args": engine}


def infra(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of `twinkle.initialize`."""
    names = ("mode", "nproc_per_node", "ncpu_proc_per_node", "lazy_collect")
    keywords = {name: getattr(args.infra, name) for name in names}
    keywords |= {"seed": args.training.seed, "full_determinism": args.training.full_determinism}
    sizes = mesh(args)
    if sizes and args.infra.mode == "local":
        from twinkle.mesh import DeviceMesh

        keywords["global_device_mesh"] = DeviceMesh.from_sizes(**sizes)
    return keywords


def mesh(args: "Args") -> dict[str, Any]:
    """Return keyword arguments of `DeviceMesh.from_sizes`."""
    sizes = {field.name: getattr(args.infra, field.name) for field in fields(args.infra)}
    keywords = {name: value for name, value in sizes.items() if name.endswith("_size") and value is not None}
    return keywords | ({"sequence_parallel": True} if args.infra.sequence_parallel else {})


def _rows(text: int | str | list[int] | None) -> "range | slice | list[int] | None":
    """Parse `data_slice`; a count selects that many rows from the start, and repeats rows if there are fewer."""
    if text is None or isinstance(text, list):
        return text
    if isinstance(text, int) and text > 0:
        return range(text)
    try:
        parts = [int(part) if part.strip() else None for part in str(text).split(":")]
    except ValueError:
        parts = []
    if not 2 <= len(parts) <= 3 or parts[2:] == [0]:
        raise ArgumentError(
            "dataset.data_slice must be a count, `start:stop`, `start:stop:step` or a list of row numbers, "
            f"got {text!r}"
        )
    return slice(*parts)


def _constructor(name: str, kind: str) -> tuple[str, Mapping[str, inspect.Parameter]]:
    """Return the name of a component and the parameters of its constructor; a function has none."""
    from twinkle._registry import registry

    component = registry().resolve(name, kind)
    if not isinstance(component, type):
        return name, {}
    return component.__name__, inspect.signature(component).parameters


def _refuse_others(args: "Args", group: str, used: Iterable[str], taker: str, hint: str) -> None:
    """Raise `ArgumentError` if an argument of the group was set that is neither used nor for the script."""
    spared = {*used, *_OF_SCRIPT.get(group, ())}
    for field in fields(getattr(args, group)):
        if field.name not in spared and args.is_set(f"{group}.{field.name}"):
            value = getattr(getattr(args, group), field.name)
            raise ArgumentError(f"{group}.{field.name} is {value!r}, but {taker} does not take it; {hint}")


def _listed(accepted: Iterable[str]) -> str:
    return ", ".join(accepted) or "no arguments"

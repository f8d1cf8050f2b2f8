"""From the configuration to the model: its weights, its adapter, and everything that trains them."""

import inspect
from typing import Any, Literal

from twinkle.errors import ConfigError
from twinkle_recipes.config import LoraConfig, ModelConfig, RunConfig

REFERENCE = "reference"
"""Name of the adapter that stays as it was."""


def build_model(config: RunConfig, steps: int, accumulation: int = 1, *, reference: bool = False) -> Any:
    """Return the model with adapter, optimizer, scheduler, loss, processor, template and metrics as configured.

    Args:
        config: of the run.
        steps: optimizer steps of the whole run, for the scheduler.
        accumulation: backward passes of one step.
        reference: whether it is asked what it said before the run (`as_before`).
    """
    model = load_model(config, config.model, config.on_nonfinite)
    if config.lora is not None:
        if reference and config.lora.init_from is not None:
            model.add_adapter_to_model(REFERENCE, config.lora.init_from, is_trainable=False)
            set_rows(model, config)
        adapter = config.lora.init_from or adapter_config(config.lora)
        model.add_adapter_to_model("default", adapter, gradient_accumulation_steps=accumulation)
    optimizer, scheduler = config.optimizer, config.scheduler
    set_rows(model, config)
    model.set_loss(config.component("loss", config.loss.name), **config.loss.args)
    decay = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    model.set_optimizer(config.component("optimizer", optimizer.name), **decay, **optimizer.args)
    lengths = lengths_of(config, steps)
    model.set_lr_scheduler(config.component("scheduler", scheduler.name), **lengths, **scheduler.args)
    for metric in config.metrics:
        model.add_metric(config.component("metric", metric))
    return model


def as_before(lora: LoraConfig) -> dict[str, Any]:
    """Return with which arguments `forward_only` answers as before the run, of a model built with `reference=True`."""
    return {"disable_lora": True} if lora.init_from is None else {"adapter_name": REFERENCE}


def lengths_of(config: RunConfig, steps: int) -> dict[str, int]:
    """Return how long a schedule and its warm-up are, as far as the scheduler asks: those of torch do not.

    Raises:
        ConfigError: `warmup_steps` is given, and the scheduler does not warm up.
    """
    scheduler = config.scheduler
    lengths = {"num_warmup_steps": scheduler.warmup(steps), "num_training_steps": steps}
    taken = inspect.signature(config.component("scheduler", scheduler.name)).parameters.values()
    names = set(lengths) if any(p.kind is p.VAR_KEYWORD for p in taken) else {p.name for p in taken}
    if scheduler.warmup_steps is not None and "num_warmup_steps" not in names:
        raise ConfigError(
            f"scheduler.warmup_steps is {scheduler.warmup_steps}, but {scheduler.name} does not warm up; leave it out, "
            "or take one that does, such as LinearWarmupScheduler"
        )
    return {name: length for name, length in lengths.items() if name in names}


def build_frozen(config: RunConfig, settings: ModelConfig) -> Any:
    """Return a model that is never trained (a reference, a teacher), with the run's template and processor."""
    model = load_model(config, settings)
    set_rows(model, config)
    model.model.requires_grad_(False)
    return model


def set_rows(model: Any, config: RunConfig) -> None:
    """Give a model the template and the processor that are configured."""
    data = config.data
    model.set_template(config.component("template", data.template), max_length=data.max_length, **data.template_args)
    model.set_processor(
        config.component("processor", config.processor), **({"padding_free": True} if data.padding_free else {})
    )


def load_model(config: RunConfig, settings: ModelConfig, on_nonfinite: Literal["raise", "skip"] = "raise") -> Any:
    """Return a configured model, without adapter."""
    recomputation = settings.gradient_checkpointing
    optional = {"dtype": settings.dtype, "gradient_checkpointing": None if recomputation == "auto" else recomputation}
    return config.build(
        "model",
        settings.type,
        model_id=settings.id,
        mixed_precision=mixed_precision(settings.mixed_precision),
        on_nonfinite=on_nonfinite,
        **{name: value for name, value in optional.items() if value is not None},
        **settings.args,
    )


def adapter_config(lora: LoraConfig) -> Any:
    """Return the adapter as PEFT describes it."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def mixed_precision(asked: str) -> str:
    """Return `asked`, or for `auto` bf16 where the device computes it natively, else `no`."""
    if asked != "auto":
        return asked
    import torch

    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    # torch has no public name for these two questions yet.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bf16" if any(probe is not None and probe() for probe in probes) else "no"


def check_tokens(config: RunConfig, other: str, called: str) -> None:
    """Compare the tokens of the trained model with those of another one.

    Args:
        config: of the run.
        other: id of the other model.
        called: what the error calls it.

    Raises:
        ConfigError: they differ; names both sizes.
    """
    if other == config.model.id:
        return
    trained, others = (
        config.build("template", config.data.template, model_id=model).tokenizer.get_vocab()
        for model in (config.model.id, other)
    )
    if different := len(trained.items() ^ others.items()):
        raise ConfigError(
            f"the {called} {other} has a vocabulary of {len(others)} tokens and the trained model {config.model.id} "
            f"one of {len(trained)}, and {different} entries differ; both need the same tokenizer, so choose "
            f"a {called} of the same family"
        )

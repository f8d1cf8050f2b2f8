"""Builds the model from the configuration: weights, adapter, and training components."""

import inspect
from typing import Any, Literal

from twinkle.errors import ConfigError
from twinkle_recipes.config import LoraConfig, ModelConfig, RunConfig

REFERENCE = "reference"
"""Name of the frozen copy of the initial adapter."""


def build_model(config: RunConfig, steps: int, accumulation: int = 1, *, reference: bool = False) -> Any:
    """Return the model with adapter, optimizer, scheduler, loss, processor, template and metrics as configured.

    Args:
        config: configuration of the run.
        steps: number of optimizer steps of the whole run, for the scheduler.
        accumulation: number of backward passes per step.
        reference: whether outputs of the initial model are needed (`as_before`).
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
    """Return the arguments of `forward_only` for outputs of the initial model; requires `reference=True`."""
    return {"disable_lora": True} if lora.init_from is None else {"adapter_name": REFERENCE}


def lengths_of(config: RunConfig, steps: int) -> dict[str, int]:
    """Return the scheduler's arguments for the numbers of steps and of warm-up steps; those of torch have none.

    Raises:
        ConfigError: `warmup_steps` is set, but the scheduler has no warm-up.
    """
    scheduler = config.scheduler
    lengths = {"num_warmup_steps": scheduler.warmup(steps), "num_training_steps": steps}
    parameters = inspect.signature(config.component("scheduler", scheduler.name)).parameters.values()
    names = set(lengths) if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}
    if scheduler.warmup_steps is not None and "num_warmup_steps" not in names:
        raise ConfigError(
            f"scheduler.warmup_steps is {scheduler.warmup_steps}, but {scheduler.name} has no warm-up; omit it, "
            "or use a scheduler with warm-up, such as LinearWarmupScheduler"
        )
    return {name: length for name, length in lengths.items() if name in names}


def build_frozen(config: RunConfig, settings: ModelConfig) -> Any:
    """Return a model that is never trained (a reference, a teacher), with the run's template and processor."""
    model = load_model(config, settings)
    set_rows(model, config)
    model.model.requires_grad_(False)
    return model


def set_rows(model: Any, config: RunConfig) -> None:
    """Set the configured template and processor of a model."""
    data = config.data
    model.set_template(config.component("template", data.template), max_length=data.max_length, **data.template_args)
    model.set_processor(
        config.component("processor", config.processor), **({"padding_free": True} if data.padding_free else {})
    )


def load_model(config: RunConfig, settings: ModelConfig, on_nonfinite: Literal["raise", "skip"] = "raise") -> Any:
    """Load the configured model, without adapter."""
    optional = {
        "dtype": settings.dtype,
        "mixed_precision": _unless_auto(settings.mixed_precision),
        "gradient_checkpointing": _unless_auto(settings.gradient_checkpointing),
    }
    return config.build(
        "model",
        settings.type,
        model_id=settings.id,
        on_nonfinite=on_nonfinite,
        **{name: value for name, value in optional.items() if value is not None},
        **settings.args,
    )


def _unless_auto(value: Any) -> Any:
    """Return a value, or None for "auto": the default of the model's class applies."""
    return None if value == "auto" else value


def adapter_config(lora: LoraConfig) -> Any:
    """Return the PEFT configuration of the adapter."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def check_tokens(config: RunConfig, other: str, called: str) -> None:
    """Compare the vocabulary of the trained model with that of another model.

    Args:
        config: configuration of the run.
        other: id of the other model.
        called: its role, for the error.

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

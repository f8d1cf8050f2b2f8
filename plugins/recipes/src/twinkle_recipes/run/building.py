"""From the configuration to the model: its weights, its adapter, and everything that trains them."""

import inspect
from typing import Any, Literal

from twinkle._registry import registry
from twinkle.errors import ConfigError
from twinkle_recipes.config.parts import LoraConfig, ModelConfig, RunConfig, SchedulerConfig
from twinkle_recipes.run.precision import mixed_precision

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
    model = load_model(config.model, config.on_nonfinite)
    if config.lora is not None:
        if reference and config.lora.init_from is not None:
            model.add_adapter_to_model(REFERENCE, config.lora.init_from, is_trainable=False)
            set_rows(model, config)
        adapter = config.lora.init_from or adapter_config(config.lora)
        model.add_adapter_to_model("default", adapter, gradient_accumulation_steps=accumulation)
    optimizer, scheduler = config.optimizer, config.scheduler
    set_rows(model, config)
    model.set_loss(config.loss.name, **config.loss.args)
    model.set_optimizer(optimizer.name, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **optimizer.args)
    model.set_lr_scheduler(scheduler.name, **lengths_of(scheduler, steps), **scheduler.args)
    for metric in config.metrics:
        model.add_metric(metric)
    return model


def as_before(lora: LoraConfig) -> dict[str, Any]:
    """Return with which arguments `forward_only` answers as before the run, of a model built with `reference=True`."""
    return {"disable_lora": True} if lora.init_from is None else {"adapter_name": REFERENCE}


def lengths_of(scheduler: SchedulerConfig, steps: int) -> dict[str, int]:
    """Return how long a schedule and its warm-up are, as far as the scheduler asks: those of torch do not.

    Raises:
        ConfigError: `warmup_steps` is given, and the scheduler does not warm up.
    """
    found: Any = registry().resolve(scheduler.name, "scheduler")
    lengths = {"num_warmup_steps": scheduler.warmup(steps), "num_training_steps": steps}
    taken = inspect.signature(found).parameters.values()
    names = set(lengths) if any(one.kind is one.VAR_KEYWORD for one in taken) else {one.name for one in taken}
    if scheduler.warmup_steps is not None and "num_warmup_steps" not in names:
        raise ConfigError(
            f"scheduler.warmup_steps is {scheduler.warmup_steps}, but {scheduler.name} does not warm up; leave it out, "
            "or take one that does, such as LinearWarmupScheduler"
        )
    return {name: length for name, length in lengths.items() if name in names}


def build_frozen(config: RunConfig, settings: ModelConfig) -> Any:
    """Return a model that is never trained (a reference, a teacher), with the run's template and processor."""
    model = load_model(settings)
    set_rows(model, config)
    model.model.requires_grad_(False)
    return model


def set_rows(model: Any, config: RunConfig) -> None:
    """Give a model the template and the processor that are configured."""
    data = config.data
    model.set_template(data.template, max_length=data.max_length, **data.template_args)
    model.set_processor(config.processor, **({"padding_free": True} if data.padding_free else {}))


def load_model(settings: ModelConfig, on_nonfinite: Literal["raise", "skip"] = "raise") -> Any:
    """Return a configured model, without adapter."""
    recomputation = settings.gradient_checkpointing
    optional = {"dtype": settings.dtype, "gradient_checkpointing": None if recomputation == "auto" else recomputation}
    return registry().build(
        settings.type,
        "model",
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

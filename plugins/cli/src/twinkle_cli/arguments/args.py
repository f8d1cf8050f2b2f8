"""The arguments of a script, by group, and the keywords that constructors take of them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_cli.arguments import groups, keywords
from twinkle_cli.arguments.names import EXTRA, GROUPS, normal, options

_MISSING: Any = object()


class _UnknownArgument(ArgumentError, KeyError):
    """A name that no argument has; a KeyError too, since it is raised by `args[name]`."""

    __str__ = Exception.__str__


@dataclass(slots=True)
class Args:
    """What `CLI.from_args` read: `args.training.max_steps`, `args["max_steps"]`, `args.get("lr")`.

    Each `get_<group>_args()` returns keywords that the group's constructor or function takes, so that it can be called
    with `**`. An argument that was set and that the constructor has no keyword for is an error; `script` arguments
    (the page "Script arguments" lists them) are left to the script.

    Attributes:
        extra: arguments of the script's own, from `--extra.name value` or `extra:` in YAML.
    """

    model: groups.ModelArgs = field(default_factory=groups.ModelArgs)
    lora: groups.LoraArgs = field(default_factory=groups.LoraArgs)
    dataset: groups.DatasetArgs = field(default_factory=groups.DatasetArgs)
    template: groups.TemplateArgs = field(default_factory=groups.TemplateArgs)
    training: groups.TrainingArgs = field(default_factory=groups.TrainingArgs)
    optimizer: groups.OptimizerArgs = field(default_factory=groups.OptimizerArgs)
    scheduler: groups.SchedulerArgs = field(default_factory=groups.SchedulerArgs)
    loss: groups.LossArgs = field(default_factory=groups.LossArgs)
    sampler: groups.SamplerArgs = field(default_factory=groups.SamplerArgs)
    sampling: groups.SamplingArgs = field(default_factory=groups.SamplingArgs)
    infra: groups.InfraArgs = field(default_factory=groups.InfraArgs)
    server: groups.ServerArgs = field(default_factory=groups.ServerArgs)
    rl: groups.RLArgs = field(default_factory=groups.RLArgs)
    checkpoint: groups.CheckpointArgs = field(default_factory=groups.CheckpointArgs)
    extra: dict[str, Any] = field(default_factory=dict)
    _given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __getitem__(self, key: str) -> Any:
        """Return the argument (`max_steps`, `training.max_steps`, `lr`), the group, or the extra argument `key`.

        Raises:
            ArgumentError: there is none; it is a KeyError too.
        """
        value = self.get(key, _MISSING)
        if value is not _MISSING:
            return value
        from twinkle_registry.naming import nearest_or_all

        raise _UnknownArgument(f"args[{key!r}]: there is no such argument; {nearest_or_all(key, options())}")

    def __contains__(self, key: str) -> bool:
        """Return whether `args[key]` exists."""
        return self.get(key, _MISSING) is not _MISSING

    def get(self, key: str, default: Any = None) -> Any:
        """Return `args[key]`, or `default` where there is no argument of that name."""
        name = normal(key)
        if name in (*GROUPS, EXTRA):
            return getattr(self, name)
        option = options().get(name)
        if option is not None:
            return getattr(getattr(self, option.path[0]), option.path[1])
        return self.extra.get(key.removeprefix(f"{EXTRA}."), default)

    def to_dict(self) -> dict[str, Any]:
        """Return all values by group; written as YAML, `--config` reads them."""
        return {group: asdict(getattr(self, group)) for group in GROUPS} | {EXTRA: dict(self.extra)}

    def is_set(self, name: str) -> bool:
        """Return whether some source, or the script, has set the argument `group.name`; a default does not count."""
        group, _, key = name.partition(".")
        return name in self._given or getattr(getattr(self, group), key) != getattr(GROUPS[group](), key)

    def get_model_args(self) -> dict[str, Any]:
        """Return keywords of `TransformersModel`, or of `MegatronModel` where `strategy` is `megatron`."""
        return keywords.model(self)

    def get_lora_args(self) -> dict[str, Any]:
        """Return fields of `peft.LoraConfig`: `target_modules`, `r`, `lora_alpha`, `lora_dropout`."""
        return keywords.lora(self)

    def get_dataset_args(self) -> dict[str, Any]:
        """Return keywords of `Dataset`: `dataset_meta`, a `DatasetMeta`, and what was set of `num_proc`, `revision`."""
        return keywords.dataset(self)

    def get_template_args(self) -> dict[str, Any]:
        """Return keywords of `Template`."""
        return keywords.template(self)

    def get_training_args(self) -> dict[str, Any]:
        """Return all arguments of the loop, which is the script's own."""
        return asdict(self.training)

    def get_optimizer_args(self) -> dict[str, Any]:
        """Return keywords of the optimizer: `lr`, and of `weight_decay`, `betas` and `eps` those that it takes."""
        return keywords.optimizer(self)

    def get_scheduler_args(self) -> dict[str, Any]:
        """Return keywords of the scheduler."""
        return keywords.scheduler(self)

    def get_loss_args(self) -> dict[str, Any]:
        """Return keywords of the loss."""
        return keywords.loss(self)

    def get_sampler_args(self) -> dict[str, Any]:
        """Return keywords of the sampler: `model_id`, and for `vLLMSampler` `engine_args`."""
        return keywords.sampler(self)

    def get_sampling_args(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`."""
        return asdict(self.sampling)

    def get_infra_args(self) -> dict[str, Any]:
        """Return keywords of `twinkle.initialize`; in mode `local` with the mesh, where a size was set."""
        return keywords.infra(self)

    def get_mesh_args(self) -> dict[str, Any]:
        """Return keywords of `DeviceMesh.from_sizes`: the sizes that were set."""
        return keywords.mesh(self)

    def get_server_args(self) -> dict[str, Any]:
        """Return all arguments of the group `server`, which is for the script."""
        return asdict(self.server)

    def get_rl_args(self) -> dict[str, Any]:
        """Return all arguments of the group `rl`, which is for the script."""
        return asdict(self.rl)

    def get_checkpoint_args(self) -> dict[str, Any]:
        """Return all arguments of the group `checkpoint`, which is for the script."""
        return asdict(self.checkpoint)

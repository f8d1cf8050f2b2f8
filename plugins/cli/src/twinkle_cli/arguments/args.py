"""The arguments of a script, by group, and conversions to keyword arguments of constructors."""

from dataclasses import asdict, dataclass, field
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_cli.arguments import groups, keywords
from twinkle_cli.arguments.names import EXTRA, GROUPS, normal, options

_MISSING: Any = object()


class _UnknownArgument(ArgumentError, KeyError):
    """An unknown argument name; also a KeyError, because `args[name]` raises it."""

    __str__ = Exception.__str__


@dataclass(slots=True)
class Args:
    """The result of `CLI.from_args`: `args.training.max_steps`, `args["max_steps"]`, `args.get("lr")`.

    Each `get_<group>_args()` returns keyword arguments of the group's constructor or function, to be passed with `**`.
    An argument that was set but is not accepted by the constructor is an error. `script` arguments (see the page
    "Script arguments") are for the script.

    Attributes:
        extra: additional arguments of the script, from `--extra.name value` or `extra:` in YAML.
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
            ArgumentError: there is no such argument; also a KeyError.
        """
        value = self.get(key, _MISSING)
        if value is not _MISSING:
            return value
        from twinkle_registry.naming import nearest_or_all

        raise _UnknownArgument(f"unknown argument {key!r}; {nearest_or_all(key, options())}")

    def __contains__(self, key: str) -> bool:
        """Return whether `args[key]` exists."""
        return self.get(key, _MISSING) is not _MISSING

    def get(self, key: str, default: Any = None) -> Any:
        """Return `args[key]`, or `default` if there is no such argument."""
        name = normal(key)
        if name in (*GROUPS, EXTRA):
            return getattr(self, name)
        option = options().get(name)
        if option is not None:
            return getattr(getattr(self, option.path[0]), option.path[1])
        return self.extra.get(key.removeprefix(f"{EXTRA}."), default)

    def to_dict(self) -> dict[str, Any]:
        """Return all values by group. Written as YAML, they can be loaded with `--config`."""
        return {group: asdict(getattr(self, group)) for group in GROUPS} | {EXTRA: dict(self.extra)}

    def is_set(self, name: str) -> bool:
        """Return whether a source or the script has set the argument `group.name`, instead of its default."""
        group, _, key = name.partition(".")
        return name in self._given or getattr(getattr(self, group), key) != getattr(GROUPS[group](), key)

    def get_model_args(self) -> dict[str, Any]:
        """Return keyword arguments of `TransformersModel`, or of `MegatronModel` if `strategy` is `megatron`."""
        return keywords.model(self)

    def get_lora_args(self) -> dict[str, Any]:
        """Return fields of `peft.LoraConfig`: `target_modules`, `r`, `lora_alpha`, `lora_dropout`."""
        return keywords.lora(self)

    def get_dataset_args(self) -> dict[str, Any]:
        """Return keyword arguments of `Dataset`: `dataset_meta`, and `num_proc` and `revision` if they are set."""
        return keywords.dataset(self)

    def get_template_args(self) -> dict[str, Any]:
        """Return keyword arguments of `Template`."""
        return keywords.template(self)

    def get_training_args(self) -> dict[str, Any]:
        """Return all arguments of the group `training`."""
        return asdict(self.training)

    def get_optimizer_args(self) -> dict[str, Any]:
        """Return keyword arguments of the optimizer: `lr`, and `weight_decay`, `betas` and `eps` if it takes them."""
        return keywords.optimizer(self)

    def get_scheduler_args(self) -> dict[str, Any]:
        """Return keyword arguments of the scheduler."""
        return keywords.scheduler(self)

    def get_loss_args(self) -> dict[str, Any]:
        """Return keyword arguments of the loss."""
        return keywords.loss(self)

    def get_sampler_args(self) -> dict[str, Any]:
        """Return keyword arguments of the sampler: `model_id`, and for `vLLMSampler` `engine_args`."""
        return keywords.sampler(self)

    def get_sampling_args(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`."""
        return asdict(self.sampling)

    def get_infra_args(self) -> dict[str, Any]:
        """Return keyword arguments of `twinkle.initialize`; in mode `local` with the mesh, if a size is set."""
        return keywords.infra(self)

    def get_mesh_args(self) -> dict[str, Any]:
        """Return keyword arguments of `DeviceMesh.from_sizes`: the sizes that are set."""
        return keywords.mesh(self)

    def get_server_args(self) -> dict[str, Any]:
        """Return all arguments of the group `server`."""
        return asdict(self.server)

    def get_rl_args(self) -> dict[str, Any]:
        """Return all arguments of the group `rl`."""
        return asdict(self.rl)

    def get_checkpoint_args(self) -> dict[str, Any]:
        """Return all arguments of the group `checkpoint`."""
        return asdict(self.checkpoint)

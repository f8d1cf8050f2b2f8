"""The adapters of a pool as training steps, checkpoints and weight transfers use them, and their limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinkle import get_logger, registry
from twinkle.digests import check_digests
from twinkle.errors import ArgumentError, CapacityError, DataError, Unsupported
from twinkle.hub import local_folder
from twinkle_transformers.adapters import CONFIG, WEIGHTS, read_config
from twinkle_transformers.flat_step import is_elementwise
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.optimizers import DEFAULT_WEIGHT_DECAY, build_optimizer
from twinkle_transformers.pool import files
from twinkle_transformers.pool.config import AdapterPlan
from twinkle_transformers.pool.pool import LoraPool, seed_of
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.stepping import set_accumulation
from twinkle_transformers.sync.terms import Changes, terms_of


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a model refuses although its pool could do it; None is no limit.

    Attributes:
        adapters: maximum number of adapters.
        rank: maximum rank of an adapter at any layer.
        length: maximum number of tokens of a row.
        targets: last names of the layers that may be adapted, or "all-linear".
    """

    adapters: int | None = None
    rank: int | None = None
    length: int | None = None
    targets: str | Sequence[str] = "all-linear"

    def __post_init__(self) -> None:
        for name, value in (("max_loras", self.adapters), ("max_r", self.rank), ("max_length", self.length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} must be an integer of at least 1, or None, got {value!r}")

    def check_count(self, name: str, count: int) -> None:
        """Refuse one more adapter where there are `count` already."""
        if self.adapters is not None and count >= self.adapters:
            raise CapacityError(
                f"cannot add adapter {name!r}: there are {count} adapters and max_loras is {self.adapters}; remove one "
                "with remove_adapter, or raise max_loras (None leaves it to memory)"
            )

    def check_plan(self, name: str, plan: AdapterPlan) -> None:
        """Refuse ranks and layers that are not allowed."""
        shapes = plan.layout.shapes.items()
        highest = max(shape.rank for _, shape in shapes)
        if self.rank is not None and highest > self.rank:
            raise ArgumentError(f"adapter {name!r}: rank must be at most max_r={self.rank}, got {highest}")
        if isinstance(self.targets, str) and self.targets == "all-linear":
            return
        allowed = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        for key, _ in shapes:
            if key.rpartition(".")[2] not in allowed and key not in allowed:
                raise ArgumentError(
                    f"adapter {name!r}: it adapts {key}, and this model allows only target_modules={allowed}"
                )

    def check_rows(self, rows: Sequence[Any]) -> None:
        """Refuse rows that are too long."""
        if self.length is None:
            return
        for number, row in enumerate(rows):
            if len(row["input_ids"]) > self.length:
                raise DataError(
                    f"row {number} has {len(row['input_ids'])} tokens, and max_length is {self.length}; cut rows with "
                    "max_length= of the template"
                )


class PooledAdapters:
    """The adapters of `MultiLoraTransformersModel`; implements `Adapters`.

    Args:
        pool: holds the adapters.
        limits: what is refused.
        defaults: fields of configurations that are given as mappings without them.

    Attributes:
        groups: training state by name.
        active: the adapter that was added last; calls must nevertheless name theirs.
    """

    def __init__(self, pool: LoraPool, limits: PoolLimits, defaults: Mapping[str, Any]) -> None:
        self._pool, self._limits, self._defaults = pool, limits, dict(defaults)
        self.groups: dict[str, OptimizerGroup] = {}
        self.active = ""

    def tenant(self, name: str | None) -> Tenant:
        """Return an adapter for use: its state is on the device."""
        if name is None:
            raise ArgumentError(
                f"adapter_name is required where many adapters share a model; there are {self._pool.tenants.names()}"
            )
        return self._pool.tenants[name]

    def add(self, name: str, config_or_dir: Any, *, accumulation: int, seed: int | None) -> None:
        """Add an adapter; see `MultiLoraTransformersModel.add_adapter_to_model`."""
        folder = local_folder(config_or_dir) if isinstance(config_or_dir, str | Path) else None
        config = config_or_dir if folder is None else read_config(folder)
        if isinstance(config, Mapping):
            config = {**self._defaults, **config}
        self._limits.check_count(name, len(self._pool.tenants))
        ref = self._pool.add(name, config, seed=self._agreed_seed(name, config, seed), saved=folder is not None)
        tenant = self._pool.tenants.find(ref)
        try:
            self._limits.check_plan(name, tenant.plan)
            set_accumulation(tenant.group, accumulation)
            if folder is not None:
                check_digests(folder, (WEIGHTS, CONFIG))
                files.load_weights(self._pool.tenants[ref], folder, self._pool.sites)
        except BaseException:
            self._pool.remove(ref)
            raise
        self.groups[name] = tenant.group
        self.active = name

    def _agreed_seed(self, name: str, config: Any, seed: int | None) -> int | None:
        """Return the seed of an adapter's first weights; if none was given, all ranks use the first rank's."""
        given = seed is not None or (isinstance(config, Mapping) and config.get("seed") is not None)
        ranks = self._pool.parallel.ranks
        if given or ranks.alone:
            return seed
        # A float64 carries 53 bits exactly.
        return int(ranks.agree(f"adapter {name!r}", float(seed_of(name) % 2**53))[0])

    def remove(self, name: str) -> None:
        """Remove an adapter with its optimizer and gradients."""
        self._pool.remove(name)
        del self.groups[name]

    def set_optimizer(self, name: str | None, optimizer_cls: Any, kwargs: dict[str, Any]) -> None:
        """Set an adapter's optimizer; see `MultiLoraTransformersModel.set_optimizer`."""
        tenant = self.tenant(name)
        resolved = registry().resolve(optimizer_cls, "optimizer")
        if isinstance(resolved, type) and is_elementwise(resolved) and kwargs.get("params") is None:
            if resolved in (torch.optim.Adam, torch.optim.AdamW) and not kwargs.get("foreach"):
                kwargs.setdefault("fused", True)
            optimizer = build_optimizer(resolved, [("adapter", tenant.flat)], **kwargs)
            for options in optimizer.param_groups:
                # `build_optimizer` exempts vectors from weight decay, but this one consists of matrices.
                if "weight_decay" in options:
                    decay = kwargs.get("weight_decay")
                    options["weight_decay"] = DEFAULT_WEIGHT_DECAY if decay is None else decay
                    options["decays"] = True
            tenant.group.left_out = []
        else:
            optimizer = build_optimizer(resolved, list(tenant.views().items()), **kwargs)
            tenant.group.left_out = [tenant.flat, *tenant.views().values()]
        tenant.group.optimizer = optimizer
        if tenant.group.lr_scheduler is not None:
            get_logger().warning("adapter %r: its scheduler followed the old optimizer; set it again", tenant.name)
            tenant.group.lr_scheduler = None

    # See `Adapters`

    def group(self, name: str | None) -> OptimizerGroup:
        """Return the training state of an adapter."""
        return self.tenant(name).group

    def select(self, name: str | None) -> OptimizerGroup:
        """Return the training state of an adapter; each pass says itself which adapters its rows use."""
        return self.tenant(name).group

    def trained(self, name: str | None, *, saving: bool = False) -> OptimizerGroup:
        """Return the training state of an adapter; every adapter of a pool can be trained."""
        return self.tenant(name).group

    def place(self, group: OptimizerGroup, *, trained: bool = True) -> None:
        """Do nothing: every rank holds whole adapters, and has drawn their first weights from the same seed."""

    def parameters(self, group: OptimizerGroup) -> Mapping[str, torch.nn.Parameter]:
        """Return what the optimizer updates by saved name: one vector, or its matrices."""
        return self.tenant(group.adapter_name).parameters()

    def weights(self, group: OptimizerGroup) -> Mapping[str, torch.Tensor]:
        """Return an adapter's weights by PEFT's names."""
        return self.state_dict(group.adapter_name)

    def state_dict(self, name: str | None) -> dict[str, torch.Tensor]:
        """Return copies of an adapter's matrices by PEFT's names."""
        tenant = self.tenant(name)
        return files.weights_of(tenant.plan, tenant.flat)

    def load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        """Copy the weights of a saved adapter into an adapter."""
        files.load_weights(self.tenant(group.adapter_name), folder, self._pool.sites)

    def resumed(self, group: OptimizerGroup) -> None:
        """Collect restored gradients of single matrices into the gradient of the adapter's vector."""
        self.tenant(group.adapter_name).adopt_gradients()

    def changes(self, name: str | None) -> tuple[str, Changes]:
        """Return the name of an adapter and its low-rank terms.

        Raises:
            Unsupported: it adapts experts.
        """
        tenant = self.tenant(name)
        version = self._pool.version(tenant.ref)
        if experts := [layer for layer, shape in version.layout.shapes.items() if shape.experts]:
            raise Unsupported(
                f"adapter {tenant.name!r} adapts experts ({experts[0]}), which can be neither merged nor sent; share "
                "the model instead: TorchSampler(model=model)"
            )
        return tenant.name, Changes(terms_of(version, self._pool.sites))

"""The adapters of a pool, with their state."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.engine import AdapterRef, Usage
from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_registry import nearest
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.pool.config import AdapterPlan
from twinkle_transformers.sites import expert_views


@dataclass(slots=True, eq=False)
class Tenant:
    """One adapter.

    Attributes:
        ref: its name and generation.
        plan: its configuration.
        flat: its weights, float32 `[P]`; `flat.grad` holds the pending gradients. One vector, so that an optimizer step
            of many adapters is a few operations on long tensors.
        group: optimizer, scheduler, loss, template, processor, metrics, counters.
        matrices: views of `flat` by PEFT's name, for optimizers that need single matrices.
        usage: cost of its operations.
    """

    ref: AdapterRef
    plan: AdapterPlan
    flat: nn.Parameter
    group: OptimizerGroup
    matrices: dict[str, nn.Parameter] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    spare: Tensor | None = None
    """Buffer of the last gradients, reused for the next: allocating memory costs more than the copy."""
    patches: list[Any] = field(default_factory=list)
    """Patches of this adapter alone; see `pool.embedding`."""
    latest: tuple[tuple[int, int], AdapterVersion] | None = None
    """The last version that was taken, and the state that it is of."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.ref.name

    @property
    def state(self) -> tuple[int, int]:
        """A value that changes whenever the weights change."""
        return self.group.updates, self.flat._version

    def add_gradient(self, grad: Tensor) -> None:
        """Add `[P]` to the pending gradients."""
        if self.flat.grad is not None:
            self.flat.grad.add_(grad)
            return
        self.flat.grad = self.reserve_gradient().copy_(grad)
        self._share_gradient()

    def reserve_gradient(self) -> Tensor:
        """Return the buffer of the gradients; it is allocated once."""
        flat = self.flat.detach()
        if self.spare is None or self.spare.shape != flat.shape or self.spare.device != flat.device:
            self.spare = torch.empty_like(flat)
        return self.spare

    def views(self) -> dict[str, nn.Parameter]:
        """Return A and B of each layer by PEFT's name; they share memory (and gradients) with the vector."""
        if not self.matrices:
            self.matrices = {name: nn.Parameter(view) for name, view in matrices_of(self.plan, self.flat.detach())}
            self._share_gradient()
        return self.matrices

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what its optimizer updates, by saved name: the vector, or its matrices."""
        optimizer = self.group.optimizer
        whole = optimizer is None or any(p is self.flat for p in self.group.parameters())
        return {"adapter": self.flat} if whole else self.views()

    def adopt_gradients(self) -> None:
        """Set the gradient of the vector from gradients that were set on its matrices."""
        if self.flat.grad is None and any(view.grad is not None for view in self.matrices.values()):
            whole = torch.zeros_like(self.flat)
            for name, target in matrices_of(self.plan, whole):
                if (grad := self.matrices[name].grad) is not None:
                    target.copy_(grad)
            self.flat.grad = whole
        self._share_gradient()

    def _share_gradient(self) -> None:
        if self.matrices and self.flat.grad is not None:
            for name, view in matrices_of(self.plan, self.flat.grad):
                self.matrices[name].grad = view

    def moved(self) -> None:
        """Point the matrices at the vector again, after its memory has changed."""
        self.spare = None
        for name, view in matrices_of(self.plan, self.flat.detach()) if self.matrices else ():
            self.matrices[name].data, self.matrices[name].grad = view, None
        self._share_gradient()


def matrices_of(plan: AdapterPlan, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield A `[r, in]` and B `[out, r]` of each layer as views of `flat`, by PEFT's name; experts as PEFT has them."""
    for name, entry in plan.layout.entries.items():
        shape = plan.layout.shapes[name]
        if entry.experts:
            yield from expert_views(plan.experts[name], entry, flat, plan.layout.entries)
            continue
        yield f"base_model.model.{name}.lora_A.weight", entry.down_of(flat)[: shape.rank]
        yield f"base_model.model.{name}.lora_B.weight", entry.up_of(flat)[: shape.rank].t()


class Tenants:
    """The adapters by name.

    Args:
        use: called with each adapter that is looked up for use, before it is returned.
    """

    def __init__(self, use: Callable[[Tenant], None]) -> None:
        self._found: dict[str, Tenant] = {}
        self._generations = 0
        self._use = use

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._found.values()))

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def names(self) -> list[str]:
        """Return the names in the order in which adapters were added."""
        return list(self._found)

    def next_ref(self, name: str) -> AdapterRef:
        """Return the reference of the adapter to be added next."""
        self._generations += 1
        return AdapterRef(name, self._generations)

    def add(self, tenant: Tenant) -> None:
        """Add an adapter."""
        self._found[tenant.name] = tenant

    def remove(self, adapter: str | AdapterRef) -> Tenant:
        """Remove an adapter and return it."""
        tenant = self.find(adapter)
        del self._found[tenant.name]
        return tenant

    def __getitem__(self, adapter: str | AdapterRef) -> Tenant:
        """Return an adapter for use: its state is on the device.

        Raises:
            CapacityError: the device has no room for it.
            Exception: as `find`.
        """
        tenant = self.find(adapter)
        self._use(tenant)
        return tenant

    def find(self, adapter: str | AdapterRef) -> Tenant:
        """Return an adapter, wherever its state is.

        Raises:
            ArgumentError: there is none of this name.
            TrainingStateError: the adapter of the reference was removed; another may have its name now.
        """
        if not isinstance(adapter, str | AdapterRef):
            raise ArgumentError(f"the name of an adapter must be a str, got a {type(adapter).__name__}")
        name = adapter if isinstance(adapter, str) else adapter.name
        tenant = self._found.get(name)
        if isinstance(adapter, AdapterRef) and (tenant is None or tenant.ref != adapter):
            raise TrainingStateError(f"the adapter {name!r} (the {adapter.generation}. of this pool) was removed")
        if tenant is None:
            hint = nearest(name, self._found)
            raise ArgumentError(
                f"there is no adapter {name!r}{f'; did you mean {hint[0]!r}?' if hint else ''}; there are "
                f"{', '.join(sorted(self._found)) or 'none'}" + ("" if hint else "; add one with add_adapter_to_model")
            )
        return tenant

"""The contract of a runtime: where components live, and how they are built and called there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.mesh import DeviceGroup, DeviceMesh


@dataclass(frozen=True)
class RuntimeOptions:
    """The arguments of `twinkle.initialize`, which documents them."""

    nproc_per_node: int = 8
    ncpu_proc_per_node: int = 8
    seed: int = 42
    full_determinism: bool = False
    groups: tuple[DeviceGroup, ...] = ()
    global_device_mesh: DeviceMesh | None = None
    lazy_collect: bool = True
    name: str | None = None
    notifier: Any = None


class Runtime(ABC):
    """Places components and calls them where they live. Each process has one current runtime.

    Attributes:
        mesh: the global device mesh; None before `initialize`.
        options: the arguments of `initialize`.
    """

    mesh: DeviceMesh | None = None
    options: RuntimeOptions = RuntimeOptions()

    @abstractmethod
    def initialize(self, options: RuntimeOptions) -> None:
        """Prepare the runtime; called again when a script initializes again.

        Raises:
            MeshError: the mesh does not fit the number of processes.
        """

    @abstractmethod
    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a stand-in for `cls(*args, **kwargs)` that lives elsewhere, or None to build it in this process."""

    @abstractmethod
    def placement(self, groups: Sequence[DeviceGroup] = ()) -> str:
        """Return a readable table of the ranks and devices of these groups, or of all groups."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release what `initialize` acquired; a second call does nothing."""

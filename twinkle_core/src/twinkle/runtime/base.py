"""The contract of a runtime: where components live, and how they are built and called there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.mesh import DeviceGroup, DeviceMesh


@dataclass(frozen=True)
class RuntimeOptions:
    """What `twinkle.initialize` was given; its docstring says what each means."""

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
    """Decides where components live and calls them there. One is current in each process.

    Attributes:
        mesh: the global device mesh; None before `initialize`.
        options: what `initialize` was given.
    """

    mesh: DeviceMesh | None = None
    options: RuntimeOptions = RuntimeOptions()

    @abstractmethod
    def initialize(self, options: RuntimeOptions) -> None:
        """Get ready; called again when a script initializes again.

        Raises:
            MeshError: the mesh does not fit the processes there are.
        """

    @abstractmethod
    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a stand-in for `cls(*args, **kwargs)` that lives elsewhere, or None to build it in this process."""

    @abstractmethod
    def placement(self, groups: Sequence[DeviceGroup] = ()) -> str:
        """Return a readable table of which ranks and devices do what, of these groups or of all."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release what `initialize` acquired; harmless when repeated."""

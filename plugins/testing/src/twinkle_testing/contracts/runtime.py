"""Contract checks of runtimes: repeated initialization and shutdown, placement, seeds."""

from dataclasses import dataclass
from typing import Any

from twinkle_testing.contracts.case import Case, Violation, require
from twinkle_testing.contracts.values import shown


class Sample:
    """A class for a runtime to build."""

    def __init__(self, number: int, *, name: str = "") -> None:
        self.number, self.name = number, name


@dataclass(kw_only=True)
class RuntimeCase(Case):
    """A runtime in this process, which is not the current one.

    Attributes:
        ranks: number of processes.
    """

    kind = "runtime"

    ranks: int = 1

    def options(self, ranks: int | None = None) -> Any:
        """Return options with a mesh of so many data ranks."""
        from twinkle.mesh import DeviceMesh
        from twinkle.runtime.base import RuntimeOptions

        return RuntimeOptions(global_device_mesh=DeviceMesh.from_sizes(dp_size=ranks or self.ranks), seed=3)


def begins_and_ends(case: RuntimeCase) -> None:
    """It can be initialized again, shut down without initialization, and shut down twice."""
    untouched = case.build()
    untouched.shutdown()
    runtime = case.build()
    try:
        runtime.initialize(case.options())
        runtime.initialize(case.options())
    finally:
        runtime.shutdown()
        runtime.shutdown()


def keeps_options(case: RuntimeCase) -> None:
    """After `initialize` it has the given mesh and options."""
    runtime, options = case.build(), case.options()
    try:
        runtime.initialize(options)
        require(runtime.options == options, f"its options are {shown(runtime.options)}")
        require(
            runtime.mesh is not None and runtime.mesh.world_size == case.ranks, f"its mesh is {shown(runtime.mesh)}"
        )
    finally:
        runtime.shutdown()


def mesh_checked(case: RuntimeCase) -> None:
    """A mesh with more ranks than processes is a MeshError, after which it can still be initialized."""
    from twinkle.errors import MeshError

    runtime = case.build()
    try:
        try:
            runtime.initialize(case.options(case.ranks + 2))
        except MeshError:
            runtime.initialize(case.options())
        else:
            raise Violation(f"a mesh of {case.ranks + 2} ranks was accepted by {case.ranks}; raise MeshError")
    finally:
        runtime.shutdown()


def builds(case: RuntimeCase) -> None:
    """`construct` returns None (build it in this process) or a stand-in that behaves like the class."""
    runtime = case.build()
    try:
        runtime.initialize(case.options())
        found: Any = runtime.construct(Sample, (5,), {"name": "a"})
        made = Sample(5, name="a") if found is None else found
        require((made.number, made.name) == (5, "a"), f"construct() gave {shown(found)}")
    finally:
        runtime.shutdown()


def placement(case: RuntimeCase) -> None:
    """`placement` is readable text, also for groups, before and after `initialize`."""
    from twinkle.mesh import DeviceGroup

    runtime = case.build()
    try:
        for begin in (False, True):
            if begin:
                runtime.initialize(case.options())
            for groups in ((), (DeviceGroup(name="trainer", ranks=1, device_type="CPU"),)):
                text = runtime.placement(groups)
                require(isinstance(text, str) and text.strip(), f"placement() is {shown(text)}; it must be text")
                require(not groups or "trainer" in text, f"placement() does not name the group: {shown(text)}")
    finally:
        runtime.shutdown()


def seeds(case: RuntimeCase) -> None:
    """The seed of its options makes torch, NumPy and `random` repeatable."""
    import random

    import numpy as np
    import torch

    drawn, runtime = [], case.build()
    try:
        for _ in range(2):
            runtime.initialize(case.options())
            drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    finally:
        runtime.shutdown()
    require(drawn[0] == drawn[1], f"two beginnings with one seed drew {drawn[0]} and {drawn[1]}")


CASE = RuntimeCase
CHECKS = (begins_and_ends, keeps_options, mesh_checked, builds, placement, seeds)

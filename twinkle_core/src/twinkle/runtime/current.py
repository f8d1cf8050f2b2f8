"""The runtime of this process: `initialize` sets it, decorators use it."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import ArgumentError, ComponentNotFound, RequirementMissing
from twinkle.mesh import DeviceGroup, DeviceMesh
from twinkle.runtime.base import Runtime, RuntimeOptions

_MISSING = {
    "ray": "the package twinkle-ray, which provides it, is not available yet in this version",
    "http": "the package twinkle-client, which provides it, is not installed; run: pip install twinkle-client",
}
"""Published modes that other packages provide, with what to do where they are absent."""
_current: Runtime | None = None


def current_runtime() -> Runtime:
    """Return the runtime that `initialize` set; before that, a local runtime without a mesh."""
    global _current
    if _current is None:
        from twinkle.runtime.process import LocalRuntime

        _current = LocalRuntime()
    return _current


def initialize(
    mode: Any = "local",
    nproc_per_node: int = 8,
    ncpu_proc_per_node: int = 8,
    seed: int = 42,
    full_determinism: bool = False,
    groups: Sequence[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    lazy_collect: bool = True,
    name: str | None = None,
    notifier: Any = None,
    **runtime_options: Any,
) -> None:
    """Choose where components live, and seed every random generator. Call it once, before you build components.

    Args:
        mode: `local` (this process, or torchrun's ranks); `http` (a service; package twinkle-client); or any other
            installed component of kind `runtime`. `ray` is a published mode that no package of this version provides.
        nproc_per_node: worker processes on each machine; only runtimes that start processes use it.
        ncpu_proc_per_node: CPU worker processes on each machine; likewise.
        seed: of Python, numpy and torch, on every rank the same.
        full_determinism: make torch use deterministic algorithms only.
        groups: device groups that `remote_group=` may name.
        global_device_mesh: the default mesh of components; by default all ranks in `dp`.
        lazy_collect: leave results on the workers until they are used; only runtimes with workers use it.
        name: name of the run in notifications; by default `TWINKLE_NAME`, or the name of the `Run`.
        notifier: receives a message when a run or the script fails: a component of kind `notifier` in any form of
            component argument, a dict as `Notifier.to_dict` returns it, or a list of these. By default those of
            `TWINKLE_NOTIFIER` (JSON), if it is set; an empty list sends no messages.
        **runtime_options: of the runtime: `base_url` and `api_key` of `http`.

    Raises:
        ArgumentError: an argument is of the wrong type.
        MeshError: the mesh does not fit the number of processes.
        RequirementMissing: no installed package provides this published mode.
    """
    from twinkle._registry import registry

    global _current
    notifiers = _notifiers(notifier)
    options = RuntimeOptions(
        nproc_per_node=_count("nproc_per_node", nproc_per_node),
        ncpu_proc_per_node=_count("ncpu_proc_per_node", ncpu_proc_per_node),
        seed=seed,
        full_determinism=full_determinism,
        groups=_groups(groups),
        global_device_mesh=_mesh(global_device_mesh),
        lazy_collect=lazy_collect,
        name=name or os.environ.get("TWINKLE_NAME", "").strip() or None,
        notifier=notifiers[0] if len(notifiers) == 1 else tuple(notifiers) or None,
    )
    runtime = _runtime(mode, runtime_options)
    before = _current
    if before is not None and type(before) is type(runtime) and not runtime_options:
        runtime = before  # it knows what it has acquired
    old = None if before is None or before.mesh is None else before.options
    if notifiers or "watch" in registry().exports("twinkle.notifier"):
        registry().attribute("twinkle.notifier", "watch")(notifiers, options.name)
    runtime.initialize(options)
    _current = runtime
    if old is not None:
        _report_change(type(before), old, type(runtime), options)
    if before is not None and before is not runtime:
        before.shutdown()


def _notifiers(given: Any) -> list[Any]:
    """Return the notifiers that `notifier=` or, where it is None, TWINKLE_NOTIFIER describes.

    Raises:
        RequirementMissing: there are some, and the package that builds them is not installed.
    """
    from twinkle._registry import registry

    if given is None and not os.environ.get("TWINKLE_NOTIFIER", "").strip():
        return []
    name = "notifiers_of_environment" if given is None else "build_notifiers"
    build = registry().attribute("twinkle.notifier", name)
    return list(build() if given is None else build(given))


def get_device_placement(device_group: Any = None) -> str:
    """Return a readable table of ranks and devices.

    Args:
        device_group: a `DeviceGroup`, a list of them, or the name of one that `initialize` was given; None means all.
    """
    runtime = current_runtime()
    if isinstance(device_group, str):
        known = [group.name for group in runtime.options.groups]
        if device_group not in known:
            raise ArgumentError(f"there is no device group {device_group!r}; initialize was given {known}")
        return runtime.placement([group for group in runtime.options.groups if group.name == device_group])
    chosen = [device_group] if isinstance(device_group, DeviceGroup) else device_group
    return runtime.placement(_groups(chosen))


def is_master() -> bool:
    """Return whether this process is rank 0, the one that logs and writes shared files."""
    from twinkle.platform import Platform

    return Platform.is_master()


def _runtime(mode: Any, runtime_options: Mapping[str, Any]) -> Runtime:
    from twinkle._registry import registry

    try:
        runtime: Runtime = registry().build(mode, "runtime", **runtime_options)
    except ComponentNotFound as error:
        if mode not in _MISSING:
            raise
        raise RequirementMissing(
            f"cannot initialize mode={mode!r}: {_MISSING[mode]}; to train in this process, use mode='local', alone or "
            "under torchrun"
        ) from error
    return runtime


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}; give a whole number from 1 on")
    return value


def _mesh(mesh: Any) -> DeviceMesh | None:
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    raise ArgumentError(
        f"global_device_mesh is {mesh!r}; give a DeviceMesh, for example DeviceMesh.from_sizes(dp_size=2)"
    )


def _groups(groups: Any) -> tuple[DeviceGroup, ...]:
    device_groups = tuple(groups or ())
    for group in device_groups:
        if not isinstance(group, DeviceGroup):
            raise ArgumentError(f"groups holds {group!r}; each must be a DeviceGroup(name, ranks, device_type)")
    names = [group.name for group in device_groups]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ArgumentError(f"several device groups are called {', '.join(twice)}; give each a name of its own")
    return device_groups


def _report_change(old_type: type, old: RuntimeOptions, new_type: type, new: RuntimeOptions) -> None:
    changes = [] if old_type is new_type else [f"runtime {old_type.__name__} -> {new_type.__name__}"]
    for field in dataclasses.fields(RuntimeOptions):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            changes.append(f"{field.name} {before} -> {after}")
    if changes:
        from twinkle.logging import get_logger

        get_logger("twinkle.runtime").info("initialize called again: %s", ", ".join(changes))

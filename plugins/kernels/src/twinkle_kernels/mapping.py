"""Reads a mapping: checks its keys, and selects the kernel of the device for each of them."""

from collections.abc import Mapping
from typing import Any

from twinkle.errors import ArgumentError, Unsupported
from twinkle.logging import get_logger
from twinkle_kernels.forward import is_layer_class, kernel_name
from twinkle_kernels.reference import HubRef
from twinkle_registry.naming import nearest_or_all

DEVICES = ("cpu", "cuda", "npu", "mps", "xpu", "default")
Key = type | str


def check_mapping(mapping: Any) -> dict[Key, Any]:
    """Return a copy of a mapping whose keys and devices are what they may be.

    Raises:
        ArgumentError: it is no mapping, or a key is neither a layer's class nor a dotted path, or a device is unknown.
    """
    if not isinstance(mapping, Mapping):
        raise ArgumentError(
            f"kernelize: mapping={mapping!r}; give a dict from layer classes or dotted paths to kernels"
        )
    for key, value in mapping.items():
        if isinstance(key, str):
            if "." not in key or not all(part.isidentifier() for part in key.split(".")):
                raise ArgumentError(f"kernelize: {key!r} is not a dotted path such as 'package.module.function'")
        elif not is_layer_class(key):
            raise ArgumentError(f"kernelize: the key {key!r} is neither a torch.nn.Module class nor a dotted path")
        if isinstance(value, Mapping):
            if not value:
                raise ArgumentError(f"kernelize: {key_name(key)}: an empty dict names no device; there are {DEVICES}")
            for device in value:
                if device not in DEVICES:
                    raise ArgumentError(f"kernelize: {key_name(key)}: {device!r} is not a device; {_nearest(device)}")
    return dict(mapping)


def kernel_for(key: Key, value: Any, device: str, *, replaces_class: bool = False) -> Any:
    """Return the kernel that a value of a mapping means on a device, None where it has none for it.

    Args:
        key: a layer's class, or a dotted path.
        value: a class, a callable, a `HubRef`, a component's name, or a dict of those by device.
        device: torch's name of the device type.
        replaces_class: whether the dotted path names a class, which only a class can replace.

    Raises:
        ArgumentError: the value is nothing of this.
        Unsupported: the kernel does not support the device.
    """
    if isinstance(value, Mapping):
        value = value.get(device, value.get("default"))
        if value is None:
            return None
    kernel = _loaded(value)
    devices = getattr(kernel, "devices", None)
    if devices is not None and device not in devices:
        raise Unsupported(
            f"kernelize: {key_name(key)}: {kernel_name(kernel)} runs on {', '.join(devices)}, and this is on {device}; "
            f"say which kernel is for which device: {{{devices[0]!r}: {kernel_name(kernel)!r}}}"
        )
    if replaces_class or is_layer_class(kernel):
        if not isinstance(kernel, type) or (isinstance(key, str) and not replaces_class):
            there = "a class" if replaces_class else "a function"
            raise ArgumentError(f"kernelize: {key_name(key)} is {there}, and {kernel_name(kernel)} is not")
        return kernel
    return _called(key, kernel)


def warn_left_alone(key: Key, value: Mapping[str, Any], device: str) -> None:
    """Say that a dict has no kernel for a device; once in a process for each key."""
    if (key, device) not in _WARNED:
        _WARNED.add((key, device))
        get_logger().warning(
            "kernelize: %s is unchanged: there is no kernel for %s, only for %s",
            key_name(key), device, ", ".join(value),
        )  # fmt: skip


_WARNED: set[tuple[Key, str]] = set()


def key_name(key: Key) -> str:
    """Return how messages name a key."""
    return key if isinstance(key, str) else key.__qualname__


def _loaded(value: Any) -> Any:
    if isinstance(value, str):
        from twinkle._registry import registry

        return registry().resolve(value, "kernel")
    if isinstance(value, HubRef):
        from twinkle_kernels.loading import load_reference

        return load_reference(value)
    return value


def _called(key: Key, kernel: Any) -> Any:
    if isinstance(kernel, type):
        if "__call__" not in {name for cls in kernel.__mro__ for name in vars(cls)}:
            raise ArgumentError(
                f"kernelize: {key_name(key)}: {kernel_name(kernel)} is neither a torch.nn.Module class nor defines "
                "__call__"
            )
        try:
            return kernel()
        except TypeError as error:
            raise ArgumentError(
                f"kernelize: {key_name(key)}: {kernel_name(kernel)} cannot be built without arguments ({error}); give "
                "an instance"
            ) from error
    if not callable(kernel):
        raise ArgumentError(
            f"kernelize: {key_name(key)}: {kernel!r} is no kernel; give a class, a function, a component's name, "
            "hub('org/repo:Layer', version=1), or a dict of those by device"
        )
    return kernel


def _nearest(device: Any) -> str:
    return nearest_or_all(str(device), DEVICES)

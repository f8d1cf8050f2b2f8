"""Finds what a mapping means in a model: its layers, and what dotted paths name."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from twinkle.errors import ArgumentError
from twinkle.platform import Platform
from twinkle_kernels.forward import KernelForward
from twinkle_kernels.mapping import Key, kernel_for, warn_left_alone


class Replacement(NamedTuple):
    """One thing to replace: the `forward` of a layer, or what a dotted path names."""

    owner: Any
    name: str
    kernel: Any


def torch_module(model: Any) -> Any:
    """Return the `torch.nn.Module` that is meant: the object itself, or what it has as `model`.

    Raises:
        ArgumentError: `model` is not and does not have a `torch.nn.Module`.
    """
    from torch import nn

    for found in (model, getattr(model, "model", None)):
        if isinstance(found, nn.Module):
            return found
    raise ArgumentError(f"kernelize: {type(model).__name__} is not a torch.nn.Module and has none as its .model")


def layer_class(layer: Any) -> type:
    """Return the class of a layer as its author wrote it.

    FSDP2 puts a subclass of its own in place of it; other subclasses say for which class they stand (`stands_for`).
    """
    import sys

    cls, fsdp = type(layer), sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and cls.__mro__[1] is fsdp.FSDPModule:
        cls = cls.__mro__[2]
    stands_for: type = vars(cls).get("stands_for", cls)
    return stands_for


def device_of(module: Any) -> str:
    """Return the type of the device of a module's first parameter or buffer, "" where it has none in any memory."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return "" if first is None or first.device.type == "meta" else str(first.device.type)


def replacements(mapping: Mapping[Key, Any], target: Any, device: str | None) -> Iterator[Replacement]:
    """Yield all that a mapping replaces; each of its values is loaded once for each device.

    Args:
        mapping: as `check_mapping` returns it.
        target: the module whose layers are looked at.
        device: what everything computes on; None takes it from each layer's parameters.
    """
    chosen: dict[tuple[Key, str], Any] = {}

    def choose(key: Key, here: str, **options: bool) -> Any:
        if (key, here) not in chosen:
            chosen[key, here] = kernel_for(key, mapping[key], here, **options)
            if chosen[key, here] is None and not mapping[key].keys() & {here, "default"}:
                warn_left_alone(key, mapping[key], here)
        return chosen[key, here]

    for layer in target.modules():
        if (cls := layer_class(layer)) in mapping:
            kernel = choose(cls, device or device_of(layer) or device_of(target) or Platform.device_prefix())
            if kernel is not None:
                yield Replacement(layer, "forward", KernelForward(layer, kernel))
    for path in (key for key in mapping if isinstance(key, str)):
        owner, name = _owner_of(path)
        here = device or device_of(target) or Platform.device_prefix()
        kernel = choose(path, here, replaces_class=isinstance(getattr(owner, name), type))
        if kernel is not None:
            yield Replacement(owner, name, kernel)


def _owner_of(path: str) -> tuple[Any, str]:
    """Return the module or class that has the last name of a dotted path, and that name."""
    import inspect
    from importlib import import_module
    from importlib.util import find_spec

    from twinkle_registry.naming import nearest_or_all

    parts = path.split(".")
    count = 0
    try:
        while count < len(parts) - 1 and find_spec(".".join(parts[: count + 1])) is not None:
            count += 1
    except ModuleNotFoundError:  # the last one found is a module and no package
        pass
    if not count:
        raise ArgumentError(f"kernelize: {path!r}: there is no module {parts[0]!r} to import")
    owner: Any = import_module(".".join(parts[:count]))
    for index, part in enumerate(parts[count:], count):
        if not hasattr(owner, part):
            known = [name for name in dir(owner) if not name.startswith("__")]
            raise ArgumentError(
                f"kernelize: {path!r}: {'.'.join(parts[:index])} has no {part!r}; {nearest_or_all(part, known)}"
            )
        if index < len(parts) - 1:
            owner = getattr(owner, part)
    raw = inspect.getattr_static(owner, parts[-1])
    if isinstance(raw, staticmethod | classmethod | property):
        raise ArgumentError(f"kernelize: {path!r} is a {type(raw).__name__}, which cannot be replaced")
    return owner, parts[-1]

"""Names of components: what a script gives as a class or as an object, in the form in which a service can build it.

A service has the components of its plugins, and no code of a script. A class is sent by its name if a plugin offers
this very class. An object is sent by the name of its class and the arguments of its constructor if these build an equal
one.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from twinkle.errors import ArgumentError

_KINDS: Final = {
    "set_loss": "loss", "set_optimizer": "optimizer", "set_lr_scheduler": "scheduler", "set_template": "template",
    "set_processor": "processor", "add_metric": "metric", "apply_patch": "patch",
}  # fmt: skip
"""Kind of component by the method that takes one."""
_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Named:
    """A component by name."""

    kind: str
    name: str
    arguments: dict[str, Any]


def component_for(method: str, given: Any, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a component that a method of a model is given.

    Args:
        method: of the model, such as `set_loss`.
        given: a name, a class, or an object.
        options: arguments beside it.

    Raises:
        ArgumentError: the service cannot have it; or an object has arguments beside it.
    """
    if isinstance(given, str):
        return given, dict(options)
    kind = _KINDS[method]
    try:
        if isinstance(given, type):
            return name_of_class(given, [kind])[1], dict(options)
        if kind != "template" and is_component(given, [kind]):  # a template has a tokenizer
            if options:
                raise ArgumentError(f"it has its arguments already; leave {', '.join(sorted(options))} out")
            named = named_object(given, [kind])
            return named.name, named.arguments
    except ArgumentError as error:
        raise ArgumentError(f"{method}: {error}") from error
    raise ArgumentError(
        f"{method}: give the name of a component that is installed on the service, got a {type(given).__name__}"
    )


def name_of_class(given: type, kinds: Iterable[str] | None = None) -> tuple[str, str]:
    """Return kind and name of the component that is a class.

    Args:
        given: the class.
        kinds: those in which it may be; None is all.

    Raises:
        ArgumentError: no plugin offers this class, perhaps another of the same name.
    """
    component = _find(given, kinds)
    if isinstance(component, tuple):
        return component
    other = f"; the component {component!r} is another class" if component else ""
    raise ArgumentError(
        f"{given.__module__}.{given.__qualname__} is not a component that a plugin offers, so the service cannot have "
        f"it{other}; give the name of one that is installed there"
    )


def is_component(given: Any, kinds: Iterable[str] | None = None) -> bool:
    """Return whether an object is one of a class that a plugin offers."""
    return not isinstance(given, type) and isinstance(_find(type(given), kinds), tuple)


def named_object(given: Any, kinds: Iterable[str] | None = None) -> Named:
    """Return the name and the arguments that build a component equal to an object.

    The arguments are read from the attributes of their names (`name` or `_name`), and accepted only if the class builds
    an object from them whose attributes equal those of the given one.

    Raises:
        ArgumentError: no plugin offers its class, or its arguments cannot be told.
    """
    cls = type(given)
    kind, name = name_of_class(cls, kinds)
    for arguments in ({}, _read_arguments(given)):
        try:
            equal = _same(vars(cls(**arguments)), vars(given))
        except Exception:  # a constructor may raise anything
            continue
        if equal:
            return Named(kind, name, arguments)
    raise ArgumentError(
        f"the {kind} {name} cannot be sent as an object, because its attributes do not show the arguments that it was "
        f"built with; give its name and its arguments, such as map({name!r}, init_args={{...}}) or "
        f"set_loss({name!r}, option=...)"
    )


def _find(given: type, kinds: Iterable[str] | None) -> tuple[str, str] | str | None:
    """Return kind and name of a class; the name of a component that is another class of this name; or None."""
    from twinkle import registry
    from twinkle.kinds import KINDS

    other = None
    for kind in KINDS if kinds is None else kinds:
        for specs in registry().specs(kind).values():
            for spec in specs:
                if _is_class(spec.ref, given):
                    return kind, spec.name
                other = spec.name if spec.name == given.__name__ else other
    return other


def _is_class(reference: str, given: type) -> bool:
    """Return whether a reference is that of a class, which may be defined in another module than its reference has."""
    module, _, name = reference.partition(":")
    if name != given.__qualname__:
        return False
    return module == given.__module__ or getattr(sys.modules.get(module), name, None) is given


def _read_arguments(given: Any) -> dict[str, Any]:
    attributes = vars(given)
    arguments: dict[str, Any] = {}
    for parameter in inspect.signature(type(given)).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for name in (parameter.name, f"_{parameter.name}"):
            if name in attributes:
                if not _same(attributes[name], parameter.default):
                    arguments[parameter.name] = attributes[name]
                break
    return arguments


def _same(one: Any, two: Any, depth: int = 0) -> bool:
    """Return whether two values are equal, by their attributes where they have no equality of their own."""
    if one is two:
        return True
    if type(one) is not type(two) or depth > _DEPTH:
        return False
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(_same(one[key], two[key], depth + 1) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(_same(a, b, depth + 1) for a, b in zip(one, two, strict=True))
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        return bool(one.shape == two.shape and one.dtype == two.dtype and (one == two).all())
    plain: Any = object
    if type(one).__eq__ is plain.__eq__:
        return hasattr(one, "__dict__") and not callable(one) and _same(vars(one), vars(two), depth + 1)
    return bool(one == two)

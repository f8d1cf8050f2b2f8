"""Checks whether an object fits the contract of its kind: an abstract class or a protocol that core names."""

from __future__ import annotations

import functools
import types
from typing import Any

from .errors import ComponentTypeError
from .naming import quoted

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
# What typing puts into every protocol, and what a class has in any case.
_NOT_MEMBERS = frozenset(
    (
        *("__abstractmethods__", "__annotations__", "__class_getitem__", "__dict__", "__doc__", "__eq__"),
        *("__firstlineno__", "__hash__", "__init__", "__match_args__", "__module__", "__new__"),
        *("__non_callable_proto_members__", "__orig_bases__", "__parameters__", "__protocol_attrs__", "__slots__"),
        *("__static_attributes__", "__subclasshook__", "__type_params__", "__weakref__"),
    )
)


def check_contract(found: Any, contract: Any, *, asked: str) -> Any:
    """Return `found` if it is an instance, a subclass or, where the contract is callable, a function.

    Args:
        found: The object to check.
        contract: A class, or None: then any class, function or instance passes.
        asked: How the error names what the caller wanted.

    Raises:
        ComponentTypeError: It does not fit; the text says what is missing.
    """
    if found is None:
        raise ComponentTypeError(f"{asked} is None; {_wanted(contract)}")
    if contract is None or not isinstance(contract, type):
        return found
    if isinstance(found, _FUNCTIONS) and is_callable_contract(contract):
        return found
    protocol = getattr(contract, "_is_protocol", False)
    problem = _protocol_problem(found, contract) if protocol else _class_problem(found, contract)
    if problem:
        raise ComponentTypeError(f"{asked} is {_shown(found)}, {problem}; {_wanted(contract)}")
    return found


def fits(found: Any, contract: Any) -> bool:
    """Say whether `check_contract` would let this pass."""
    try:
        check_contract(found, contract, asked="")
    except ComponentTypeError:
        return False
    return True


def is_callable_contract(contract: type) -> bool:
    """Say whether instances of the contract are called, so that a plain function can stand for one."""
    return any("__call__" in vars(base) for base in contract.__mro__)


def missing_methods(found: type) -> list[str]:
    """Return the abstract methods that a class leaves open, which makes it impossible to instantiate."""
    return sorted(getattr(found, "__abstractmethods__", ()))


def _class_problem(found: Any, contract: type) -> str:
    if isinstance(found, type):
        return "" if issubclass(found, contract) else f"not a subclass of {_name(contract)}"
    return "" if isinstance(found, contract) else f"not an instance of {_name(contract)}"


def _protocol_problem(found: Any, contract: type) -> str:
    if isinstance(found, type):
        if contract in found.__mro__:
            return ""
        # An instance may get its attributes in __init__, so of a class only the methods are asked for.
        members = [m for m in _members(contract) if callable(getattr(contract, m, None))]
    elif isinstance(found, types.ModuleType):
        return f"not an object with the methods of {_name(contract)}"
    else:
        members = _members(contract)
    # `type` has a __call__ of its own, so a class is asked through its mro, never through getattr.
    cls = found if isinstance(found, type) else type(found)
    lacks = [m for m in members if not (_defines(cls, m) or (cls is not found and hasattr(found, m)))]
    return f"without {quoted(lacks)}, which {_name(contract)} requires" if lacks else ""


def _members(contract: type) -> list[str]:
    names: set[str] = set()
    for base in contract.__mro__[:-1]:
        if getattr(base, "_is_protocol", False) and base.__module__ != "typing":
            names.update(vars(base), vars(base).get("__annotations__", ()))
    return sorted(n for n in names - _NOT_MEMBERS if not n.startswith("_abc_") and not n.startswith("_is_"))


def _defines(cls: type, member: str) -> bool:
    return any(vars(base).get(member) is not None for base in cls.__mro__[:-1])


def _wanted(contract: Any) -> str:
    if not isinstance(contract, type):
        return "pass a class, a function, an instance or a name"
    function = ", a function" if is_callable_contract(contract) else ""
    return f"pass an instance of {_name(contract)}, a class of that kind{function} or a name"


def _name(contract: type) -> str:
    return f"{contract.__module__}.{contract.__qualname__}"


def _shown(found: Any) -> str:
    if isinstance(found, type):
        return f"the class {_name(found)}"
    if isinstance(found, types.FunctionType):
        return f"the function {found.__module__}.{found.__qualname__}"
    if not isinstance(found, str | int | float | bytes):  # the repr of a model or a tensor fills a screen
        return f"an instance of {_name(type(found))}"
    text = repr(found)
    return f"{text if len(text) <= 100 else text[:97] + '...'} ({_name(type(found))})"

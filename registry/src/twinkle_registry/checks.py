"""Checks objects against the contract of their kind, and arguments against a signature, before they are used."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, ComponentTypeError
from .naming import nearest, quoted

if TYPE_CHECKING:
    import inspect

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
# Members that typing adds to every protocol, and those of every class.
_NOT_MEMBERS = frozenset(
    (
        *("__abstractmethods__", "__annotations__", "__class_getitem__", "__dict__", "__doc__", "__eq__"),
        *("__firstlineno__", "__hash__", "__init__", "__match_args__", "__module__", "__new__"),
        *("__non_callable_proto_members__", "__orig_bases__", "__parameters__", "__protocol_attrs__", "__slots__"),
        *("__static_attributes__", "__subclasshook__", "__type_params__", "__weakref__"),
    )
)


def check_contract(component: Any, contract: Any, *, context: str) -> Any:
    """Return `component` if it is an instance, a subclass or, where the contract is callable, a function.

    Args:
        component: The object to check.
        contract: A class, or None: then any class, function or instance passes.
        context: How the error names the request.

    Raises:
        ComponentTypeError: It does not fit; the text says what is missing.
    """
    if component is None:
        raise ComponentTypeError(f"{context} is None; {_expected(contract)}")
    if contract is None or not isinstance(contract, type):
        return component
    if isinstance(component, _FUNCTIONS) and is_callable_contract(contract):
        return component
    protocol = getattr(contract, "_is_protocol", False)
    problem = _protocol_problem(component, contract) if protocol else _class_problem(component, contract)
    if problem:
        raise ComponentTypeError(f"{context} is {_shown(component)}, {problem}; {_expected(contract)}")
    return component


def fits(component: Any, contract: Any) -> bool:
    """Return whether `check_contract` accepts the object."""
    try:
        check_contract(component, contract, context="")
    except ComponentTypeError:
        return False
    return True


def is_callable_contract(contract: type) -> bool:
    """Return whether instances of the contract are callable, so that a plain function satisfies it."""
    return any("__call__" in vars(base) for base in contract.__mro__)


def missing_methods(component: type) -> list[str]:
    """Return the abstract methods that a class does not implement; such a class cannot be instantiated."""
    return sorted(getattr(component, "__abstractmethods__", ()))


def _class_problem(component: Any, contract: type) -> str:
    if isinstance(component, type):
        return "" if issubclass(component, contract) else f"not a subclass of {_name(contract)}"
    return "" if isinstance(component, contract) else f"not an instance of {_name(contract)}"


def _protocol_problem(component: Any, contract: type) -> str:
    if isinstance(component, type):
        if contract in component.__mro__:
            return ""
        # An instance may get its attributes in __init__, so for a class only methods are required.
        members = [m for m in _members(contract) if callable(getattr(contract, m, None))]
    elif isinstance(component, types.ModuleType):
        return f"not an object with the methods of {_name(contract)}"
    else:
        members = _members(contract)
    # `type` has a __call__ of its own, so members of a class are looked up in its mro, not with getattr.
    cls = component if isinstance(component, type) else type(component)
    lacks = [m for m in members if not (_defines(cls, m) or (cls is not component and hasattr(component, m)))]
    return f"without {quoted(lacks)}, which {_name(contract)} requires" if lacks else ""


def _members(contract: type) -> list[str]:
    names: set[str] = set()
    for base in contract.__mro__[:-1]:
        if getattr(base, "_is_protocol", False) and base.__module__ != "typing":
            names.update(vars(base), vars(base).get("__annotations__", ()))
    return sorted(n for n in names - _NOT_MEMBERS if not n.startswith("_abc_") and not n.startswith("_is_"))


def _defines(cls: type, member: str) -> bool:
    return any(vars(base).get(member) is not None for base in cls.__mro__[:-1])


def _expected(contract: Any) -> str:
    if not isinstance(contract, type):
        return "pass a class, a function, an instance or a name"
    function = ", a function" if is_callable_contract(contract) else ""
    return f"pass an instance of {_name(contract)}, a class of that kind{function} or a name"


def _name(contract: type) -> str:
    return f"{contract.__module__}.{contract.__qualname__}"


def _shown(component: Any) -> str:
    if isinstance(component, type):
        return f"the class {_name(component)}"
    if isinstance(component, types.FunctionType):
        return f"the function {component.__module__}.{component.__qualname__}"
    if not isinstance(component, str | int | float | bytes):  # the repr of a model or a tensor fills a screen
        return f"an instance of {_name(type(component))}"
    text = repr(component)
    return f"{text if len(text) <= 100 else text[:97] + '...'} ({_name(type(component))})"


_LONG = 300
_SHOWN = 12


def check_keywords(
    callable: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    what: str,
    args: Sequence[Any] = (),
    partial: bool = False,
) -> None:
    """Raise `ArgumentError` unless `callable(*args, **kwargs)` fits the signature of `callable`.

    Args:
        callable: A class or a function; one with `**kwargs` accepts every keyword, one that has no signature
            (some builtins) is not checked.
        kwargs: The keyword arguments of the call.
        what: How the error names the callable, for example `loss 'GRPOLoss' of twinkle-losses`.
        args: The positional arguments of the call.
        partial: More arguments follow later, so missing ones are not an error.
    """
    import inspect  # deferred: `twinkle --help` must start fast

    try:
        signature = inspect.signature(callable)
    except (TypeError, ValueError):
        return
    problems = [
        *_unknown(signature, kwargs),
        *_surplus(signature, args, kwargs),
        *([] if partial else _missing(signature, args, kwargs)),
    ]
    if problems:
        name = getattr(callable, "__name__", type(callable).__name__)
        raise ArgumentError(f"{what}: {'; '.join(problems)}. {_text(name, signature)}")


def _text(name: str, signature: inspect.Signature) -> str:
    text = str(signature.replace(return_annotation=signature.empty))
    if len(text) <= _LONG:
        return f"Its signature is {name}{text}"
    parameters = list(signature.parameters)
    more = f" and {len(parameters) - _SHOWN} more" if len(parameters) > _SHOWN else ""
    return f"{name} takes {', '.join(parameters[:_SHOWN])}{more}"


def _keywords(signature: inspect.Signature) -> list[str]:
    return [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _positional(signature: inspect.Signature) -> list[str]:
    return [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _unknown(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> list[str]:
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return []
    known = _keywords(signature)
    problems = []
    for name in kwargs:
        if name not in known:
            close = nearest(name, known, 1)
            problems.append(f"unknown argument {name!r}" + (f", nearest: {close[0]!r}" if close else ""))
    return problems


def _surplus(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    places = _positional(signature)
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    problems = []
    if len(args) > len(places) and not takes_any:
        problems.append(f"at most {len(places)} positional arguments are accepted, got {len(args)}")
    by_keyword = set(_keywords(signature))
    duplicates = [name for name in places[: len(args)] if name in kwargs and name in by_keyword]
    if duplicates:
        problems.append(f"both positional and keyword: {quoted(duplicates)}")
    return problems


def _missing(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    missing = []
    place = 0
    for p in signature.parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            place += 1
            is_passed = place <= len(args) or (p.kind is not p.POSITIONAL_ONLY and p.name in kwargs)
        elif p.kind is p.KEYWORD_ONLY:
            is_passed = p.name in kwargs
        else:
            continue
        if not is_passed and p.default is p.empty:
            missing.append(p.name)
    return [f"missing argument {quoted(missing)}"] if missing else []

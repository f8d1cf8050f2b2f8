"""Decorators of remote classes and functions. They record options; the runtime uses these to place and call."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from twinkle._arguments import explains_calls
from twinkle.errors import ArgumentError
from twinkle.runtime.current import current_runtime

Execute = Literal["first", "peer", "all"]
Dispatch = Literal["slice", "all", "slice_dp"] | Callable[..., Any]
Collect = Literal["none", "flatten", "mean", "sum", "first", "last_pp", "last_pp_first"] | Callable[..., Any]

_EXECUTE = ("first", "peer", "all")
_DISPATCH = ("slice", "all", "slice_dp")
_COLLECT = ("none", "flatten", "mean", "sum", "first", "last_pp", "last_pp_first")
_PLACING = ("remote_group", "instance_id")
_MARK = "__twinkle_remote__"

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RemoteClass:
    """How a class is placed: on the first worker of its group, on the caller's peer, or on all."""

    execute: Execute = "all"


@dataclass(frozen=True)
class RemoteFunction:
    """How a method is called on the workers of its object; `remote_function` documents the values."""

    dispatch: Dispatch = "slice"
    execute: Execute = "all"
    collect: Collect = "none"
    sync: bool = False
    lazy_collect: bool | None = None
    timeout: float | None = None


def remote_class(execute: Execute = "all") -> Callable[[C], C]:
    """Mark a class whose objects a runtime may place on workers.

    Its constructor, and that of its subclasses, then also takes `remote_group=` (the device group to live on) and
    `instance_id=`. A parameter `device_mesh` that is None gets the global mesh. `inspect.signature` is unchanged.

    Args:
        execute: on which workers of the group the object is built: `first`, `peer` (of the caller) or `all`.
    """
    _one_of("execute", execute, _EXECUTE)

    def mark(cls: C) -> C:
        if not isinstance(cls, type):
            raise ArgumentError(f"@remote_class() requires a class, got {cls!r}; use @remote_function() for functions")
        already = hasattr(cls, _MARK)
        setattr(cls, _MARK, RemoteClass(execute))
        if not already:
            _wrap_new(cls)
            _wrap_init(cls)
            _wrap_subclasses(cls)
        return cls

    return mark


def remote_function(
    dispatch: Dispatch = "slice",
    execute: Execute = "all",
    collect: Collect = "none",
    sync: bool = False,
    lazy_collect: bool | None = None,
    timeout: float | None = None,
) -> Callable[[F], F]:
    """Mark a method that a runtime may call on workers; with the local runtime it is a plain call.

    Args:
        dispatch: arguments of each worker: `slice` (its part of the per-sample arguments), `slice_dp` (the part of its
            data rank), `all` (everything), or a function `(workers, index, args, kwargs, device_mesh=)` that returns
            `(args, kwargs)`.
        execute: which workers run it: `first`, `peer` or `all`.
        collect: how results are combined: `none` (the list of results, or the result itself if there is one),
            `flatten`, `mean`, `sum`, `first`, `last_pp`, `last_pp_first`, or a function `(results, device_mesh=)`.
        sync: wait until all workers have finished before the next call.
        lazy_collect: leave results on the workers until they are used; None follows `initialize`.
        timeout: seconds after which a call that has not returned is an error; None waits indefinitely.
    """
    _one_of("execute", execute, _EXECUTE)
    _one_of("dispatch", dispatch, _DISPATCH, or_callable=True)
    _one_of("collect", collect, _COLLECT, or_callable=True)
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout is {timeout!r}; give seconds above 0, or None to wait for ever")
    spec = RemoteFunction(dispatch, execute, collect, sync, lazy_collect, timeout)

    def mark(function: F) -> F:
        if not callable(function):
            raise ArgumentError(f"@remote_function() requires a function, got {function!r}")
        function = explains_calls(function)
        setattr(function, _MARK, spec)
        return function

    return mark


def _one_of(name: str, value: Any, allowed: tuple[str, ...], *, or_callable: bool = False) -> None:
    if value in allowed or (or_callable and callable(value)):
        return
    if isinstance(value, type) or callable(value):
        raise ArgumentError(
            f"{name} is {value!r}; if that is what you decorate, write the decorator with brackets: @...()"
        )
    from twinkle_registry import nearest

    close = nearest(str(value), allowed, 1)
    hint = f", nearest: {close[0]!r}" if close else ""
    function = " or a function" if or_callable else ""
    raise ArgumentError(f"{name} is {value!r}{hint}; use one of {', '.join(allowed)}{function}")


def _wrap_new(cls: Any) -> None:
    """Let the runtime return a stand-in instead of building an object in this process."""
    own = vars(cls).get("__new__")

    def __new__(klass: Any, *args: Any, **kwargs: Any) -> Any:
        stand_in = current_runtime().construct(klass, args, kwargs)
        if stand_in is not None:
            return stand_in
        new = own.__func__ if own is not None else super(cls, klass).__new__
        return new(klass) if new is object.__new__ else new(klass, *args, **_without(_PLACING, kwargs))

    cls.__new__ = _signed_as(cls.__init__)(__new__)


def _wrap_init(cls: Any) -> None:
    """Remove placement arguments and fill in the global mesh."""
    init = cls.__init__
    build = explains_calls(init)
    position = _position_of_mesh(init)
    placing = set(_PLACING) - set(inspect.signature(init).parameters)

    @_signed_as(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = _without(placing, kwargs)
        if position is not None:
            args, kwargs = _with_mesh(args, kwargs, position)
        build(self, *args, **kwargs)

    cls.__init__ = __init__


def _wrap_subclasses(cls: Any) -> None:
    """Do the same for the constructor of every subclass that defines one."""
    own = vars(cls).get("__init_subclass__")

    def __init_subclass__(subclass: Any, /, **kwargs: Any) -> None:
        if own is not None:
            own.__func__(subclass, **kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        if "__init__" in vars(subclass):
            _wrap_init(subclass)

    cls.__init_subclass__ = classmethod(__init_subclass__)


def _signed_as(init: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Copy the metadata of `init` to a wrapper, so that `inspect.signature` of the class is unchanged."""

    def sign(wrapper: Callable[..., Any]) -> Any:
        functools.update_wrapper(wrapper, init)
        if init is object.__init__:
            # The signature of `object.__init__` is (*args, **kwargs), though it takes no arguments.
            own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            wrapper.__signature__ = inspect.Signature([own])  # type: ignore[attr-defined]
        return wrapper

    return sign


def _without(names: Collection[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


def _position_of_mesh(init: Callable[..., Any]) -> int | None:
    """Return the index of the parameter `device_mesh` among the arguments after self, or None if it is absent."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    for index, parameter in enumerate(parameters):
        if parameter.name == "device_mesh":
            return sys.maxsize if parameter.kind is inspect.Parameter.KEYWORD_ONLY else index
    return None


def _with_mesh(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mesh = current_runtime().mesh
    if position < len(args):
        return (args if args[position] is not None else (*args[:position], mesh, *args[position + 1 :])), kwargs
    if kwargs.get("device_mesh") is None:
        kwargs = {**kwargs, "device_mesh": mesh}
    return args, kwargs

"""Calls: what the client does, written once and run synchronously or asynchronously.

A call is a generator that yields what it needs, an HTTP request to send or seconds to sleep, and returns a result. It
does no input or output itself, so one implementation serves both kinds of script, and tests need no network.
"""

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="Runs")


@dataclass(frozen=True, slots=True)
class Send:
    """An HTTP request to be sent once.

    Attributes:
        method: of HTTP.
        path: from the root of the service.
        content: the body.
        headers: beside those of the connection.
        timeout: seconds without a byte of the answer.
    """

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause of some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; `headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    content: bytes


Call = Generator[Send | Sleep, Any, T]
"""It is sent an `Answer` for `Send` and None for `Sleep`; a failed request is thrown in as `ConnectionError`."""


class Runs(Protocol):
    """An object with a connection that runs calls."""

    def run(self, call: Call[T]) -> T:
        """Run a call, and return its result."""

    async def run_async(self, call: Call[T]) -> T:
        """Run a call on the current event loop, and return its result."""


def twins(
    method: Callable[Concatenate[S, P], Call[T]],
) -> tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Awaitable[T]]]:
    """Return the two public forms of a method that is written as a call.

    `save, save_async = twins(_save)` in the body of a class gives a method `save` and a coroutine method `save_async`
    with the signature and the docstring of `_save`. A call that does not fit the signature is an `ArgumentError`.
    """

    def wait(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            call = method(self, *args, **kwargs)  # a generator, whose body has not begun
        except TypeError as error:
            raise _explained(wait, error, (self, *args), kwargs) from error
        return self.run(call)

    async def wait_async(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            call = method(self, *args, **kwargs)
        except TypeError as error:
            raise _explained(wait_async, error, (self, *args), kwargs) from error
        return await self.run_async(call)

    name = method.__name__.lstrip("_")
    forms: list[tuple[Any, str]] = [(wait, name), (wait_async, f"{name}_async")]
    for form, own in forms:
        form.__name__, form.__doc__, form.__module__ = own, method.__doc__, method.__module__
        form.__qualname__ = method.__qualname__.removesuffix(method.__name__) + own
        form.__wrapped__ = method  # whose signature inspect.signature returns, without reading it at import
    return forms[0][0], forms[1][0]


def _explained(form: Callable[..., Any], error: TypeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """Return the error of a call that does not fit the signature of a method, as a local method raises it."""
    from twinkle_registry import ArgumentError, check_keywords

    try:
        check_keywords(form, kwargs, what=form.__qualname__, args=args)
    except ArgumentError as explained:
        return explained
    return error

"""Data resources: data sets, loaders, templates, processors, preprocessors and rewards that live on a service.

`DataResource` is the only implementation; the public classes list the published methods with their signatures.
"""

import functools
import inspect
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

import twinkle.errors
from twinkle.errors import ArgumentError, ComponentTypeError
from twinkle_client import naming, wire
from twinkle_client.calls import Call
from twinkle_client.client import current_client
from twinkle_client.data_rows import meta_fields, with_bytes, without_bytes
from twinkle_client.errors import ConnectionFailed, Gone, Overloaded, ServiceError, TwinkleClientError

if TYPE_CHECKING:
    from twinkle_client.http import Connection

T = TypeVar("T")
TIMEOUT: Final = 600.0
"""Seconds that the answer of a call may take; the service has its own limit."""
_POLL: Final = 0.005
_BY_VALUE: Final = ("preprocessor", "filter", "processor")
"""Kinds whose objects are sent by the name of their class and their arguments."""


class Client(Protocol):
    """What a resource needs of a client."""

    @property
    def connection(self) -> "Connection":
        """The connection to the service."""

    @property
    def session_id(self) -> str:
        """The session with which resources end."""


class DataResource:
    """A component that lives on a service. Its calls are numbered, so that a repeated request is carried out once.

    Any number of threads and event loops may use it; its calls run one after the other. Every method `name` also exists
    as coroutine `name_async`.

    Args:
        name: of the component.
        args: of its constructor.
        kwargs: of its constructor.
        client: where it lives; by default the client of the last `init_twinkle_client`.
        parent: a resource whose process it shares.

    Attributes:
        kind: of the component.
        eager: whether the resource is created by the constructor; otherwise by the first call.
    """

    kind: ClassVar[str] = ""
    eager: ClassVar[bool] = False

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, client: Client | None = None,
        parent: "DataResource | None" = None,
    ) -> None:  # fmt: skip
        if kwargs.get("remote_group") is not None or kwargs.get("instance_id") is not None:
            raise ArgumentError("remote_group= and instance_id= place components of Ray; a service places its own")
        self._name, self._parent = name, parent
        self._client: Client = client or (parent._client if parent is not None else current_client())
        self._args = [sendable(value) for value in args]
        self._kwargs = _keywords(
            {key: value for key, value in kwargs.items() if key not in ("remote_group", "instance_id")}
        )
        self._lock = threading.Lock()
        self._key = uuid.uuid4().hex
        self._id: str | None = None
        self._number = 0
        self._unanswered: tuple[str, bytes] | None = None
        if self.eager:
            self._run(self._created())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} on {self._client.connection.base_url}>"

    @property
    def resource_id(self) -> str:
        """The id of the resource on the service, which is created if it does not exist yet."""
        return self._run(self._created())

    def close(self) -> None:
        """Delete the resource on the service, and its process if no other resource is in it. A second time is no error.

        Resources are also deleted when their session ends.
        """
        self._run(self._deleted())

    async def close_async(self) -> None:
        """As `close`."""
        await self._run_async(self._deleted())

    def __enter__(self) -> "DataResource":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def recipe(self) -> dict[str, Any]:
        """Return the form in which other resources take this component: its name and arguments.

        Raises:
            ArgumentError: it was built with positional arguments.
        """
        if self._args:
            raise ArgumentError(
                f"give the arguments of {self._name} by name, so that other resources can build it, too"
            )
        return {"$component": {"kind": self.kind, "name": self._name, "arguments": self._kwargs}}

    # Calls

    def _invoke(self, method: str, kwargs: Mapping[str, Any], timeout: float = TIMEOUT) -> Call[Any]:
        """Call a method on the service.

        Raises:
            TwinkleError: what the method raises on the service.
            Gone: the resource no longer exists.
        """
        frame = wire.pack({"args": [], "kwargs": _keywords(kwargs)})
        yield from self._created()
        if self._unanswered not in (None, (method, frame)):
            yield from self._settled(timeout)
        return with_bytes((yield from self._numbered(method, frame, timeout)))

    def _numbered(self, method: str, frame: bytes, timeout: float) -> Call[Any]:
        self._unanswered = method, frame
        query = {"method": method, "number": self._number + 1}
        try:
            answer = yield from self._client.connection.request(
                "POST", f"/data/{self._id}/call", frame, query=query, timeout=timeout
            )
        except (ConnectionFailed, Overloaded, ServiceError):  # it may run, or have run; the same number finds out
            raise
        except TwinkleClientError as error:
            self._unanswered = None
            if error.kind is not None:  # the component raised it; other requests are refused before they are counted
                self._number += 1
            raise _local_error(error) from error
        self._number, self._unanswered = self._number + 1, None
        return answer

    def _settled(self, timeout: float) -> Call[None]:
        """Repeat a call whose answer was lost, so that the service and this object count alike."""
        method, frame = self._unanswered or ("", b"")
        try:
            yield from self._numbered(method, frame, timeout)
        except (ConnectionFailed, Overloaded, ServiceError, Gone):
            raise
        except twinkle.errors.TwinkleError:
            return

    def _created(self) -> Call[str]:
        if self._id is None:
            parent = None
            if self._parent is not None:
                parent = yield from self._parent._created()
            query = {"session_id": self._client.session_id, "kind": self.kind, "name": self._name, "parent": parent}
            frame = wire.pack({"args": self._args, "kwargs": self._kwargs})
            try:
                answer = yield from self._client.connection.request(
                    "POST", "/data", frame, query=query, request_id=self._key, timeout=TIMEOUT
                )
            except TwinkleClientError as error:
                raise _local_error(error) from error
            self._id = str(answer["resource_id"])
        return self._id

    def _deleted(self) -> Call[None]:
        if self._id is not None:
            yield from self._client.connection.request("DELETE", f"/data/{self._id}")

    def _run(self, call: Call[T]) -> T:
        with self._lock:
            return self._client.connection.run(call)

    async def _run_async(self, call: Call[T]) -> T:
        import asyncio

        while not self._lock.acquire(blocking=False):  # another thread or task waits for an answer
            await asyncio.sleep(_POLL)
        try:
            return await self._client.connection.run_async(call)
        finally:
            self._lock.release()


class _Method:
    """A method that runs on the service; see `remote`."""

    def __init__(self, stub: Callable[..., Any], name: str) -> None:
        self._stub, self._name = stub, name

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        """The signature, read at the first call: it takes longer than the rest of the import."""
        return inspect.signature(self._stub)

    def __set_name__(self, owner: type, name: str) -> None:
        wait, wait_async = self._forms()
        forms: list[tuple[Any, str]] = [(wait, name), (wait_async, f"{name.strip('_')}_async")]
        for form, own in forms:
            form.__name__, form.__doc__, form.__module__ = own, self._stub.__doc__, self._stub.__module__
            form.__qualname__ = f"{owner.__qualname__}.{own}"
            form.__wrapped__ = self._stub  # whose signature inspect.signature returns
            setattr(owner, own, form)

    def _forms(self) -> tuple[Callable[..., Any], Callable[..., Awaitable[Any]]]:
        def wait(this: DataResource, *args: Any, **kwargs: Any) -> Any:
            given, timeout = self._given(this, args, kwargs)
            return this._run(this._invoke(self._name, given, timeout))

        async def wait_async(this: DataResource, *args: Any, **kwargs: Any) -> Any:
            given, timeout = self._given(this, args, kwargs)
            return await this._run_async(this._invoke(self._name, given, timeout))

        return wait, wait_async

    def _given(self, this: DataResource, args: Any, kwargs: Any) -> tuple[dict[str, Any], float]:
        """Return the arguments by name, only those that were given, and the timeout."""
        try:
            bound = self._signature.bind(this, *args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{type(this).__name__}.{self._name.strip('_')}: {error}") from error
        given = dict(list(bound.items())[1:])
        more = given.pop("kwargs", {})
        timeout = given.pop("timeout", TIMEOUT)
        return {**given, **more}, float(timeout)


def remote(stub: Callable[..., T]) -> Callable[..., T]:
    """Turn a method that has a signature, but no body, into a call on the service, and add its `_async` form."""
    return _Method(stub, stub.__name__)  # type: ignore[return-value]


class Iterated(DataResource):
    """A resource that can be iterated: each iteration begins a new one on the service, and ends the one before.

    Attributes:
        page: items that one request fetches.
    """

    page: ClassVar[int] = 1

    def __iter__(self) -> Iterator[Any]:
        """Yield the items; the service keeps the position."""
        iteration = self._run(self._invoke("__iter__", {}))
        end = False
        while not end:
            answer = self._run(self._invoke("__next__", {"iteration": iteration, "count": self.page}))
            end = answer["end"]
            yield from answer["items"]

    async def __aiter__(self) -> Any:
        """Yield the items asynchronously."""
        iteration = await self._run_async(self._invoke("__iter__", {}))
        end = False
        while not end:
            answer = await self._run_async(self._invoke("__next__", {"iteration": iteration, "count": self.page}))
            end = answer["end"]
            for item in answer["items"]:
                yield item


def sendable(value: Any) -> Any:
    """Return an argument in the form of requests.

    Raises:
        ArgumentError: it is code, or an object that the service cannot build.
    """
    from twinkle.dataset.meta import DatasetMeta

    if isinstance(value, DataResource):
        return {"$resource": value.resource_id} if isinstance(value, Iterated) else value.recipe()
    if isinstance(value, DatasetMeta):
        return {"$meta": meta_fields(value)}
    if isinstance(value, range):
        return {"$range": [value.start, value.stop, value.step]}
    if isinstance(value, slice):
        return {"$slice": [value.start, value.stop, value.step]}
    if isinstance(value, type):
        return naming.name_of_class(value)[1]
    if naming.is_component(value, _BY_VALUE):
        named = naming.named_object(value, _BY_VALUE)
        return {"$component": {"kind": named.kind, "name": named.name, "arguments": _keywords(named.arguments)}}
    if callable(value):
        raise ArgumentError(
            f"{value!r} cannot run on the service; give the name of an installed component, or transform the rows here "
            "and send them: Dataset(DatasetMeta(data=rows))"
        )
    if isinstance(value, Mapping):
        return _keywords(value)
    if isinstance(value, list | tuple):
        return value if value and isinstance(value[0], int | float) else [sendable(item) for item in value]
    return without_bytes(value)


def _keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sendable(value) for name, value in given.items()}


def _local_error(error: TwinkleClientError) -> Exception:
    """Return the error that a local component would have raised."""
    kind = getattr(twinkle.errors, error.kind or "", None)
    return kind(str(error)) if isinstance(kind, type) and issubclass(kind, Exception) else error


def dataset_of(given: Any) -> DataResource:
    """Return the data set of a loader.

    Raises:
        ComponentTypeError: it does not live on the service.
    """
    if not isinstance(given, DataResource) and callable(given):
        given = given()
    if isinstance(given, DataResource) and given.kind == "dataset":
        return given
    raise ComponentTypeError(
        f"dataset is a {type(given).__name__}, which is not on the service; give a data set of twinkle_client.dataset, "
        "or use twinkle.dataloader.DataLoader, whose batches a client model takes as well"
    )

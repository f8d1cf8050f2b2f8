"""Calls that a worker process handles: creating a resource, calling one of its methods, and dropping it."""

import contextlib
import logging
import os
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import datasets
import pyarrow
import torch
import transformers  # noqa: F401  # imported before processes are forked

import twinkle.errors
from twinkle import registry
from twinkle.errors import ArgumentError, ComponentNotFound, DataError, TrainingStateError, TwinkleError, Unsupported
from twinkle_client import wire
from twinkle_client.errors import WireError
from twinkle_registry import nearest
from twinkle_server.data.arguments import Arguments
from twinkle_server.data.confinement import NotConfined, confine
from twinkle_server.data.offered import KINDS, allowed
from twinkle_server.data.rules import Rules

METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "template": (
        "encode", "batch_encode", "check", "batch_check", "format_trajectory", "decode", "batch_decode",
        "parse_tool_call", "clean_tool_call", "concat_input_feature",
    ),
    "processor": ("__call__", "collate_fn", "split_rows", "unpack_packed_sequences", "unpack_inputs"),
    "preprocessor": ("__call__",),
    "filter": ("__call__", "reset"),
    "reward": ("__call__",),
    "dataset": (),
    "dataloader": (),
}  # fmt: skip
"""Methods that requests may call, by kind; of data sets and loaders, those that are remote functions, and iteration."""
_ITERATION: Final = ("__iter__", "__next__")
_LOCAL: Final = ("save_as", "flush_save", "__iter__", "chunks", "in_order")
"""Remote functions that requests cannot call: they write files, or return iterators."""
_PROPERTIES: Final = ("column_names",)
_BATCH: Final = 4096
_LONGEST: Final = 4000
_FOLDER: Final = re.compile(r"(?<![\w.:/])/(?:[^\s/'\":,;]+/)+")
_log = logging.getLogger(__name__)


def import_all(rules: Rules) -> None:
    """Prepare the first process for forking: import what resources need, and start no threads."""
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    datasets.disable_progress_bars()
    for kind in KINDS:
        for specs in registry().specs(kind).values():
            for spec in filter(allowed, specs):
                if spec.dist.startswith("twinkle-"):
                    with contextlib.suppress(TwinkleError):  # reported where a request names it
                        registry().load(spec)
    for folder in set(rules.models.values()):
        with contextlib.suppress(TwinkleError):  # likewise
            _warm_up(folder)


def _warm_up(folder: str) -> None:
    """Encode a row once, which imports the modules of the tokenizer."""
    template = registry().build("Template", "template", model_id=folder)
    template.encode({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})


@dataclass(slots=True)
class _Iteration:
    number: int
    rows: Iterator[Any]


class DataCalls:
    """Handles the calls of one worker process.

    Args:
        rules: what requests may name.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._resources: dict[str, tuple[str, Any]] = {}
        self._iterations: dict[str, _Iteration] = {}
        self._arguments = Arguments(rules, self._referred, self._built)
        self._confined = False

    def do(self, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle `create`, `call` or `drop`; an exception is returned as data."""
        try:
            self._confine()
            if what == "create":
                return self._create(**request)
            if what == "call":
                return self._call(**request)
            return self._drop(**request)
        except BaseException as error:  # also SystemExit and MemoryError of components
            return {"error": self._error_fields(error)}

    def _confine(self) -> None:
        if self._confined:
            return
        hubs = self._rules.schemes
        registry().confine(lambda spec: allowed(spec) or (spec.kind == "hub" and spec.name in hubs))
        writable = _hub_folders() if hubs else []
        confine([*self._rules.models.values(), *self._rules.sets.values()], writable, network=bool(hubs))
        self._confined = True

    def _create(self, resource: str, kind: str, name: str, body: bytes) -> dict[str, Any]:
        args, kwargs = self._arguments.given(_unpacked(body))
        made = self._built(kind, name, kwargs, args)
        self._check_rows(made)
        self._resources[resource] = kind, made
        return {}

    def _drop(self, resource: str, body: bytes = b"") -> dict[str, Any]:
        self._resources.pop(resource, None)
        self._iterations.pop(resource, None)
        return {}

    def _call(self, resource: str, method: str, body: bytes) -> dict[str, Any]:
        kind, target = self._resources[resource]
        args, kwargs = self._arguments.given(_unpacked(body))
        if method in _ITERATION and kind in ("dataset", "dataloader"):
            value = self._iterate(resource, target, method, *args, **kwargs)
        elif kind == "dataset" and method == "rows":
            value = self._page(_rows(target, *args, **kwargs), _BATCH)[0]
        else:
            _check_method(kind, target, method)
            value = getattr(target, method)
            value = value if method in _PROPERTIES else value(*args, **kwargs)
            self._check_rows(target)
        frame = wire.pack(_sendable(value))
        if len(frame) > self._rules.answer_bytes:
            raise DataError(
                f"the result of {method.strip('_')} has {len(frame)} bytes, the limit of this service is "
                f"{self._rules.answer_bytes}; ask for fewer rows at once"
            )
        return {"body": frame}

    def _iterate(self, resource: str, target: Any, method: str, iteration: Any = 0, count: Any = 1) -> Any:
        if method == "__iter__":
            before = self._iterations.get(resource)
            number = 1 if before is None else before.number + 1
            self._iterations[resource] = _Iteration(number, iter(target))
            return number
        current = self._iterations.get(resource)
        if current is None or current.number != iteration:
            raise TrainingStateError(
                "another iteration over this resource has begun, which ends this one; use one at a time"
            )
        if type(count) is not int or not 1 <= count <= _BATCH:
            raise ArgumentError(f"count must be between 1 and {_BATCH}, got {count!r}")
        items, end = self._page(current.rows, count)
        return {"items": items, "end": end}

    def _page(self, rows: Iterator[Any], count: int) -> tuple[list[Any], bool]:
        """Return the next items: at most `count`, and fewer if they are large; and whether there are no more."""
        items: list[Any] = []
        size = 0
        for item in rows:
            items.append(item)
            size += _size(item)
            if len(items) == count or size > self._rules.answer_bytes // 4:
                return items, False
        return items, True

    def _referred(self, resource: str) -> Any:
        if resource not in self._resources:
            raise ArgumentError("a loader must be given a data set of this service; create it first")
        return self._resources[resource][1]

    def _built(self, kind: str, name: str, kwargs: Mapping[str, Any], args: Sequence[Any] = ()) -> Any:
        if kind not in METHODS:
            close = nearest(kind, METHODS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ComponentNotFound(f"data resources have no kind {kind!r}{hint}; kinds: {', '.join(METHODS)}")
        return registry().build(name, kind, *args, **kwargs)

    def _check_rows(self, made: Any) -> None:
        if not hasattr(made, "row_lengths") or getattr(made, "dataset", None) is None:
            return
        with contextlib.suppress(TwinkleError, NotImplementedError, TypeError):
            size = len(made)
            if size > self._rules.rows:
                raise _TooLarge(f"the data set has {size} rows; this service allows {self._rules.rows}")

    def _error_fields(self, error: BaseException) -> dict[str, Any]:
        """Return an error as data: its type, and its text without folders of this machine."""
        own = isinstance(error, TwinkleError)
        refused = _cause(error, NotConfined)
        if refused is not None:
            own, error = True, Unsupported(str(refused))
        text = str(error) if own else (str(error).splitlines() or [""])[0][:300]
        name, known = type(error).__name__, own
        if own:  # the nearest class that clients know
            name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(twinkle.errors, kind.__name__))
        if isinstance(error, WireError):
            name, known = "ArgumentError", True
        public = _FOLDER.sub("…/", self._rules.public(text))[:_LONGEST]
        return {
            "type": name if known else "DataError",
            "text": public if known else f"the call raised {name}: {public}",
            "memory": isinstance(error, MemoryError) or "allocate memory" in str(error),
            "too_large": str(error) if isinstance(error, _TooLarge) else None,
            "log": "" if known else "".join(traceback.format_exception(error))[-_LONGEST:],
        }


class _TooLarge(MemoryError):
    """A data set has grown beyond the limit of rows."""


def _unpacked(body: bytes) -> Any:
    return wire.unpack(body) if body else {"args": [], "kwargs": {}}


def _check_method(kind: str, target: Any, method: str) -> None:
    remote = [
        name
        for name in dir(type(target))
        if kind in ("dataset", "dataloader")
        and name not in _LOCAL
        and (name in _PROPERTIES or hasattr(getattr(type(target), name, None), "__twinkle_remote__"))
    ]
    known = [*METHODS[kind], *remote]
    if method not in known or not hasattr(target, method):
        close = nearest(method, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ComponentNotFound(f"a {kind} on a service has no method {method[:80]!r}{hint}; it has {', '.join(known)}")


def _rows(target: Any, start: Any, count: Any) -> Iterator[Any]:
    """Yield consecutive rows of a data set with a length."""
    if type(start) is not int or type(count) is not int or start < 0 or not 1 <= count <= _BATCH:
        raise ArgumentError(f"rows(start, count) takes whole numbers, count at most {_BATCH}")
    return (target[index] for index in range(start, min(start + count, len(target))))


def _size(value: Any) -> int:
    """Return the approximate size of a value in a frame in bytes."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return 8 * len(value) if value and isinstance(value[0], int | float) else sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else int(getattr(value, "nbytes", 8))


def _sendable(value: Any) -> Any:
    """Return a result with bytes and images in a form that the wire has."""
    if isinstance(value, Mapping):
        return {str(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return {
            "$bytes": torch.frombuffer(bytearray(value), dtype=torch.uint8)
            if value
            else torch.empty(0, dtype=torch.uint8)
        }
    if isinstance(value, list | tuple):
        numbers = len(value) >= 16 and isinstance(value[0], int | float)  # the wire checks these itself
        return value if numbers else [_sendable(item) for item in value]
    return value


def _cause(error: BaseException, kind: type[NotConfined]) -> NotConfined | None:
    """Return the refusal that an error was caused by."""
    link: BaseException | None = error
    for _ in range(16):
        if link is None:
            return None
        if isinstance(link, kind):
            return link
        link = link.__cause__ or link.__context__
    return None


def _hub_folders() -> list[str]:
    """Return the folders that client libraries of hubs write: their caches, and that of temporary files."""
    from twinkle.paths import cache_dir

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    usual = {"HF_HOME": caches / "huggingface", "MODELSCOPE_CACHE": caches / "modelscope"}
    own = [os.environ.get(name) or str(folder) for name, folder in usual.items()]
    return [*own, str(cache_dir()), tempfile.gettempdir()]

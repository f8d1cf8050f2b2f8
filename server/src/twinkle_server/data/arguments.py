"""Arguments of requests for data resources: what they may contain, and their conversion to Python objects.

Besides JSON values and tensors, a request may contain these objects, each with one key: `$meta` (the fields of a
`DatasetMeta`), `$component` (kind, name and arguments of a component), `$resource` (an id), `$range`, `$slice` and
`$bytes`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import ArgumentError, ComponentTypeError, DataError
from twinkle_server.data.rules import Rules

_MODEL: Final = ("model_id", "tokenizer_id")
_SINGLE: Final = {
    "num_proc": (None, 0, 1), "num_workers": (0,), "packing_num_proc": (1,), "load_from_cache_file": (None, False),
}  # fmt: skip
"""Arguments that start processes or use caches, and the values with which they do not."""
_REFUSED: Final = {
    "tokenizer": "the service loads the tokenizer of model_id",
    "device_mesh": "a data resource gives whole batches, which the service divides over its devices",
    "cache_file_name": "data resources are held in memory",
    "cache_file_names": "data resources are held in memory",
    "keep_in_memory": "data resources are always held in memory",
    "trust_remote_code": "the service runs no code of hubs",
    "token": "the service loads public data only; send the rows of private data: DatasetMeta(data=rows)",
}
_META: Final = ("dataset_id", "subset_name", "split", "data_slice", "data")
_DEEPEST: Final = 64


class Arguments:
    """Converts the arguments of requests.

    Args:
        rules: what they may name.
        resource: returns a resource of this process by id.
        build: builds a component from kind, name and arguments.
    """

    def __init__(
        self, rules: Rules, resource: Callable[[str], Any], build: Callable[[str, str, Mapping[str, Any]], Any]
    ) -> None:
        self._rules, self._resource, self._build = rules, resource, build

    def given(self, request: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return positional arguments and keywords of a request.

        Raises:
            ArgumentError: the request has another form, or an argument is not supported on a service.
            DataError: a data set cannot be loaded by the service, or is too large.
            Unsupported: the service does not have the tokenizer of a model.
        """
        if not isinstance(request, Mapping) or set(request) != {"args", "kwargs"}:
            raise ArgumentError("a call must be an object with the keys 'args' and 'kwargs'")
        args, kwargs = request["args"], request["kwargs"]
        if not isinstance(args, list) or not isinstance(kwargs, Mapping):
            raise ArgumentError("'args' must be a list, and 'kwargs' an object")
        return [self._value(item) for item in args], self.keywords(kwargs)

    def keywords(self, given: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
        """Return the converted keywords of a call or of `init_args`.

        Raises:
            ArgumentError: see `given`.
        """
        converted = {}
        for name, value in given.items():
            if name in _REFUSED and value is not None:
                raise ArgumentError(f"{name}= cannot be used with a data resource of a service: {_REFUSED[name]}")
            if name in _SINGLE and value not in _SINGLE[name]:
                raise ArgumentError(
                    f"{name} must be {_SINGLE[name][-1]!r} for a data resource, got {value!r}: it has one process"
                )
            if name in _MODEL and value:
                value = self._model(name, value)
            converted[name] = self._value(value, depth + 1)
        return {name: value for name, value in converted.items() if name not in _REFUSED}

    def _model(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ArgumentError(f"{name} must be the id of a model, got a {type(value).__name__}")
        return self._rules.model(value)

    def _value(self, value: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ArgumentError(f"arguments must not be nested deeper than {_DEEPEST}")
        if isinstance(value, list):
            return [self._value(item, depth + 1) for item in value]
        if not isinstance(value, Mapping):
            return value
        if len(value) == 1:
            [(mark, content)] = value.items()
            if mark in _MARKS:
                return _MARKS[mark](self, content)
        return self.keywords(value, depth)

    def _meta(self, fields: Any) -> DatasetMeta:
        if not isinstance(fields, Mapping) or set(fields) - set(_META):
            raise ArgumentError(f"a DatasetMeta has the fields {', '.join(_META)}")
        name = fields.get("dataset_id", "")
        texts = [name, fields.get("subset_name", "default"), fields.get("split", "train")]
        if not all(isinstance(text, str) and len(text) <= 512 for text in texts):
            raise ArgumentError("dataset_id, subset_name and split must be texts of at most 512 characters")
        data = fields.get("data")
        place = name if data is not None else self._rules.data_set(name)
        return DatasetMeta(place, texts[1], texts[2], self._slice(fields.get("data_slice")), self._rows(data))

    def _slice(self, value: Any) -> Any:
        chosen = self._value(value)
        if isinstance(chosen, range | list) and len(chosen) > self._rules.rows:
            raise DataError(
                f"data_slice has {len(chosen)} rows; a data set on this service has at most {self._rules.rows}"
            )
        if chosen is None or isinstance(chosen, range | slice | list | int):
            return chosen
        raise DataError(
            f"data_slice must be a number, a range, a slice or a list of numbers, got {type(value).__name__}"
        )

    def _rows(self, data: Any) -> Any:
        if data is None:
            return None
        if not isinstance(data, list | Mapping):
            raise DataError(f"data must be a list of rows or an object of columns, got a {type(data).__name__}")
        columns = [column for column in data.values() if isinstance(column, list)] if isinstance(data, Mapping) else []
        size = max(map(len, columns), default=0) if isinstance(data, Mapping) else len(data)
        if size > self._rules.rows:
            raise DataError(f"the data set has {size} rows; this service allows {self._rules.rows}")
        return _restored(data)

    def _component(self, content: Any) -> Any:
        if not isinstance(content, Mapping) or set(content) != {"kind", "name", "arguments"}:
            raise ArgumentError("a component must have the keys 'kind', 'name' and 'arguments'")
        kind, name, arguments = content["kind"], content["name"], content["arguments"]
        if not isinstance(kind, str) or not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ArgumentError("kind and name of a component must be texts, and its arguments an object")
        return self._build(kind, name, self.keywords(arguments))

    def _referred(self, content: Any) -> Any:
        if not isinstance(content, str):
            raise ArgumentError("the id of a resource must be a text")
        return self._resource(content)


def _restored(value: Any) -> Any:
    """Return rows with bytes in place of `$bytes`; everything else in rows is content, not an argument."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {"$bytes"}:
            return _bytes(None, value["$bytes"])
        return {key: _restored(item) for key, item in value.items()}
    return value


def _bytes(_arguments: Any, content: Any) -> bytes:
    if str(getattr(content, "dtype", "")) != "uint8":
        raise ComponentTypeError("$bytes must be a tensor of dtype uint8")
    return bytes(content.tobytes())


def _numbers(make: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def convert(_arguments: Any, content: Any) -> Any:
        valid = isinstance(content, list) and len(content) == 3
        if not valid or not all(part is None or type(part) is int for part in content):
            raise ArgumentError(f"a {make.__name__} must be a list of start, stop and step, got {str(content)[:80]}")
        try:
            return make(*content)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"not a {make.__name__}: {error}") from error

    return convert


_MARKS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "$meta": Arguments._meta,
    "$component": Arguments._component,
    "$resource": Arguments._referred,
    "$range": _numbers(range),
    "$slice": _numbers(slice),
    "$bytes": _bytes,
}

"""Valid bodies with one field changed into what breaks servers: every place of a body, every class of bad value."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Path = tuple[Any, ...]
_MARK = "\x01raw:"
_LARGEST = "179769313486231580793e289"


@dataclass(frozen=True)
class Raw:
    """JSON text that stands in a body as it is."""

    text: str


def nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    """Return lists or objects in each other."""
    return Raw(opening * depth + closing * depth)


JSON_VALUES: dict[str, Any] = {
    "null": None, "true": True, "false": False, "zero": 0, "one": 1, "minus one": -1,
    "int32 + 1": 2**31, "int32 - 1": -(2**31) - 1, "uint32 + 1": 2**32, "2**53 + 1": 2**53 + 1,
    "int64": 2**63 - 1, "int64 + 1": 2**63, "int64 min": -(2**63), "int64 - 1": -(2**63) - 1,
    "uint64 + 1": 2**64, "70 bits": 2**70, "400 digits": 10**400, "5000 digits": Raw("9" * 5000),
    "half": 0.5, "minus zero": Raw("-0.0"), "1e308": 1e308, "1e400": Raw("1e400"), "-1e400": Raw("-1e400"),
    "beyond double": Raw(_LARGEST), "denormal": Raw("1e-400"), "huge exponent": Raw("1e999999999"),
    "integer as float": Raw("1.0"), "nan": Raw("NaN"), "inf": Raw("Infinity"), "-inf": Raw("-Infinity"),
    "empty text": "", "space": " ", "long text": "x" * 5000, "nul": "\0", "nul inside": "a\0b",
    "surrogate": Raw('"\\ud800"'), "low surrogate": Raw('"a\\udc00"'), "reversed pair": Raw('"\\udc00\\ud800"'),
    "bidi": "é\u202e", "emoji": "\U0001f600", "climbing": "../../secret", "tinker path": "tinker://a/weights/..",
    "number as text": "18446744073709551616", "nan as text": "nan", "base64": "!!!=", "template": "{session_id}",
    "empty list": [], "empty object": {}, "list of lists": [[]], "list of null": [None], "list of objects": [{}],
    "text in list": ["x"], "bool in list": [True], "float in list": [0.5], "uint64 in list": [2**64],
    "surrogate in list": Raw('["\\ud800"]'), "nan in list": Raw("[NaN]"), "empty key": {"": None},
    "other union": {"type": "other"}, "nul key": {"\0": 1}, "surrogate key": Raw('{"\\ud800": 1}'),
    "1000 numbers": [1] * 1000,
    "nested 60": nested(60), "nested 1000": nested(1000), "nested objects": Raw('{"a":' * 1000 + "1" + "}" * 1000),
    "nested 100000": nested(100_000), "not JSON": Raw("{"), "single quotes": Raw("'x'"),
}  # fmt: skip
"""What a value is changed into, by class."""
_OF_KEYS = ("left out", "renamed", "twice", "twice, differing", "unknown beside")


def json_places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values in a body, itself included; of long lists, the first two entries."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from json_places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from json_places(value[index], (*path, index))


def json_mutations(body: Any) -> list[tuple[str, Path]]:
    """Return all changes of a body: a class, and a place."""
    found = [(kind, path) for path in json_places(body) for kind in JSON_VALUES]
    return found + [
        (kind, path) for path in json_places(body) if path and isinstance(path[-1], str) for kind in _OF_KEYS
    ]


def mutated_json(body: Any, kind: str, path: Path) -> bytes:
    """Return a body with one change."""
    return write_json(_changed(body, kind, path))


def _changed(value: Any, kind: str, path: Path) -> Any:
    if not path:
        return JSON_VALUES[kind]
    head, rest = path[0], path[1:]
    if isinstance(value, list):
        return [_changed(item, kind, rest) if index == head else item for index, item in enumerate(value)]
    if rest or kind in JSON_VALUES:
        return {key: _changed(item, kind, rest) if key == head else item for key, item in value.items()}
    if kind == "left out":
        return {key: item for key, item in value.items() if key != head}
    if kind == "renamed":
        return {(f"{key}_" if key == head else key): item for key, item in value.items()}
    if kind == "unknown beside":
        return {**value, f"{head}_": value[head]}
    text = write_json(value[head]).decode()
    other = text if kind == "twice" else "[null]"
    return {key: Raw(f"{text},{json.dumps(head)}:{other}") if key == head else item for key, item in value.items()}


def write_json(value: Any) -> bytes:
    """Write a body in which `Raw` texts stand as they are."""
    texts: list[str] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Raw):
            texts.append(item.text)
            return f"{_MARK}{len(texts) - 1}"
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        return [plain(inner) for inner in item] if isinstance(item, list) else item

    made = json.dumps(plain(value))
    for number, text in enumerate(texts):
        made = made.replace(json.dumps(f"{_MARK}{number}"), text, 1)
    return made.encode()


_INTEGERS = {
    FieldDescriptor.TYPE_INT32: [0, -1, 1, 2**31 - 1, -(2**31)],
    FieldDescriptor.TYPE_INT64: [0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 2**64 - 1],
    FieldDescriptor.TYPE_ENUM: [0, 1, 2, 3, 4, 99, -1],
    FieldDescriptor.TYPE_BOOL: [True, False],
}
_FLOATS = [0.0, -0.0, -1.0, 1e-320, 1e308, -1e308, 1e39, float("nan"), float("inf"), float("-inf")]
_TEXTS = ["", "x", "\0", "a\0b", "é\u202e", "x" * 5000, "../../secret", "loss.x", "custom", "ppo", "stable_reinforce"]
_INT64S = np.asarray([2**63 - 1, -(2**63), -1, 2**31, 2**40], "<i8")


def _bytes(data: bytes) -> list[bytes]:
    zeros, ones = bytes(len(data)), b"\xff" * len(data)  # as floats: 0 and NaN; as integers: 0 and -1
    extremes = [np.resize(_INT64S, (len(data) + 7) // 8).tobytes()[: len(data)]]
    extremes += [
        np.full((len(data) + 3) // 4, value, "<f4").tobytes()[: len(data)] for value in (np.inf, -np.inf, 3e38, 1e-45)
    ]
    return [b"", data[:-1], data[:-4], data[:-8], data + b"\0", data + data, zeros, ones, b"x", *extremes]


def _scalars(field: FieldDescriptor, value: Any) -> list[Any]:
    if field.type in _INTEGERS:
        return list(_INTEGERS[field.type])
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return list(_FLOATS)
    return _bytes(value) if field.type == FieldDescriptor.TYPE_BYTES else list(_TEXTS)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def proto_mutations(message: Message, path: Path = ()) -> Iterator[tuple[Path, str, Any]]:
    """Yield all changes of a message: a path of fields, keys and indices, what is done there, and with what."""
    for field, value in message.ListFields():
        here = (*path, field.name)
        yield here, "clear", None
        if _is_map(field):
            for key in list(value):
                yield (*here, key), "drop", None
                for name in ("", "x", "\0", "labels", "x" * 300):
                    yield (*here, key), "rename", name
                if field.message_type.fields_by_name["value"].message_type is not None:
                    yield from proto_mutations(value[key], (*here, key))
                else:
                    for bad in _scalars(field.message_type.fields_by_name["value"], value[key]):
                        yield (*here, key), "set", bad
        elif isinstance(value, Message):
            yield from proto_mutations(value, here)
        elif hasattr(value, "append") or hasattr(value, "add"):
            yield here, "repeat", None
            for index in range(min(2, len(value))):
                yield (*here, index), "drop", None
                if isinstance(value[index], Message):
                    yield from proto_mutations(value[index], (*here, index))
                else:
                    for bad in _scalars(field, value[index]):
                        yield (*here, index), "set", bad
        else:
            for bad in _scalars(field, value):
                yield here, "set", bad


def mutated_proto(message: Message, path: Path, action: str, value: Any) -> bytes:
    """Return a message with one change, as bytes."""
    made = type(message)()
    made.CopyFrom(message)
    owner: Any = made
    for step in path[:-1]:
        owner = getattr(owner, step) if isinstance(owner, Message) else owner[step]
    last = path[-1]
    if action == "clear":
        owner.ClearField(last)
    elif action == "drop":
        del owner[last]
    elif action == "repeat":
        entries = list(getattr(owner, last))
        getattr(owner, last).extend(entries)
    elif action == "rename":
        moved = owner[last]
        if isinstance(moved, Message):
            owner[value].CopyFrom(moved)
        else:
            owner[value] = moved
        del owner[last]
    elif isinstance(owner, Message):
        setattr(owner, last, value)
    else:
        owner[last] = value
    return bytes(made.SerializeToString())

"""Command-line options made from a pydantic model: one for each field, nested models dotted."""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Path = tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """One field of a configuration model.

    Attributes:
        path: the names that lead to it: `("lora", "rank")` is `--lora.rank`.
        annotation: its type as written.
        description: what it means.
        default: its default, or None where it is required or a group.
        required: it has none.
        group: it is a nested model; its fields are options of their own.
    """

    path: Path
    annotation: Any
    description: str = ""
    default: Any = None
    required: bool = False
    group: bool = False

    @property
    def name(self) -> str:
        """Return `lora.rank`."""
        return ".".join(self.path)

    @property
    def types(self) -> tuple[Any, ...]:
        """The plain types that a value may have; `str | None` has two."""
        return tuple(_leaves(self.annotation))

    @property
    def type_text(self) -> str:
        """The type in words: `int`, `str | None`, `list[str]`, `'a' | 'b'`."""
        return type_text(self.annotation)


def options_of(model: "type[BaseModel]", prefix: Path = ()) -> Iterator[Option]:
    """Yield the options of a model, groups before their fields; a model inside itself is not entered again."""
    yield from _options(model, prefix, (model,))


def _options(model: "type[BaseModel]", prefix: Path, parents: tuple[type, ...]) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        yield _option((*prefix, name), field, group=nested is not None)
        if nested is not None and nested not in parents:
            yield from _options(nested, (*prefix, name), (*parents, nested))


def _option(path: Path, field: "FieldInfo", group: bool) -> Option:
    default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    return Option(path, field.annotation, field.description or "", default, field.is_required(), group)


def nested_model(annotation: Any) -> "type[BaseModel] | None":
    """Return the one model that `annotation` is (perhaps with None), or None."""
    from pydantic import BaseModel

    found = [leaf for leaf in _leaves(annotation) if leaf is not types.NoneType]
    only = found[0] if len(found) == 1 else None
    return only if isinstance(only, type) and issubclass(only, BaseModel) else None


def type_text(annotation: Any) -> str:
    """Return how the help shows a type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_text(argument) for argument in arguments))
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if arguments and isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(type_text(argument) for argument in arguments)}]"
    if annotation in (None, types.NoneType):
        return "null"
    return getattr(annotation, "__name__", str(annotation).removeprefix("typing."))


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, `Annotated` taken off; of anything else, itself."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from alternatives(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from alternatives(argument)
    else:
        yield types.NoneType if annotation is None else annotation


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types in a union, without their parameters; of a literal, the types of its values."""
    for member in alternatives(annotation):
        if typing.get_origin(member) is typing.Literal:
            yield from dict.fromkeys(type(value) for value in typing.get_args(member))
        else:
            yield typing.get_origin(member) or member

"""Compares our public interface with the published one, which `published-api.toml` lists.

`page()` is the generated part of `reference/published-api.md`. It raises an error if a difference has no explanation,
or an explanation no difference.
"""

import ast
import dataclasses
import importlib
import inspect
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("published-api.toml")
_OPTIONAL = object()
"""A default that is not compared."""
_REQUIRED = inspect.Parameter.empty
_LATER, _ABSENT, _SAME = "later", "absent", "same"


class NotExplained(Exception):
    """Differences without explanation, or explanations without difference."""


@dataclass(frozen=True)
class Entry:
    """One published name.

    Attributes:
        module: where it is imported from.
        name: the name, with that of its class.
        signature: as published; None for a name without one.
        fields: fields of a typed dict or dataclass; None for other entries.
        group: the group of the data file.
    """

    module: str
    name: str
    signature: str | None
    fields: tuple[str, ...] | None
    group: dict[str, Any]

    @property
    def key(self) -> str:
        """The key of an explanation."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Finding:
    """What the comparison of one entry gave.

    Attributes:
        entry: the entry.
        state: same, different, absent, or later.
        text: what differs.
    """

    entry: Entry
    state: str
    text: str = ""


def data() -> dict[str, Any]:
    """Return the data file."""
    return tomllib.loads(DATA.read_text("utf-8"))


def entries(groups: list[dict[str, Any]]) -> Iterator[Entry]:
    """Yield all published names."""
    for group in groups:
        for text in group.get("callables", ()):
            yield Entry(group["module"], text.partition("(")[0], text, None, group)
        for name in group.get("attributes", ()):
            yield Entry(group["module"], name, None, None, group)
        for name, fields in group.get("fields", {}).items():
            yield Entry(group["module"], name, None, tuple(fields), group)


def compare(entry: Entry, passed_to: Mapping[str, list[str]] | None = None) -> Finding:
    """Compare one entry with what we have.

    Args:
        entry: the entry.
        passed_to: by the key of an entry, the functions (`module:name`) to which it passes its keyword arguments.

    Raises:
        NotExplained: an entry passes its keyword arguments to a function that does not exist.
    """
    found = _find(entry)
    if entry.group.get("later"):
        return Finding(entry, _LATER if found is None else "different", "exists already: remove `later` of its group")
    if found is None:
        return Finding(entry, _ABSENT)
    if entry.fields is not None:
        missing = [name for name in entry.fields if name not in _fields(found)]
        return Finding(entry, "different", f"has no {', '.join(missing)}") if missing else Finding(entry, _SAME)
    if entry.signature is None or entry.signature.endswith("(...)"):
        return Finding(entry, _SAME)
    text = "; ".join(
        _differences(entry.signature, inspect.signature(found), _names_of((passed_to or {}).get(entry.key, [])))
    )
    return Finding(entry, "different" if text else _SAME, text)


def _find(entry: Entry) -> Any:
    """Return the object of an entry; None if there is none."""
    try:
        found: Any = importlib.import_module(entry.module)
    except ModuleNotFoundError:
        return None
    owner, _, member = entry.name.partition(".")
    found = getattr(found, owner, None)
    if found is None or not member:
        return found
    if member in _fields(found):
        return member
    value = inspect.getattr_static(found, member, None)
    return value.__func__ if isinstance(value, staticmethod) else getattr(found, member, value)


def _fields(found: Any) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return set(getattr(found, "model_fields", None) or getattr(found, "__annotations__", ()))


def _names_of(functions: Iterable[str]) -> set[str]:
    """Return the names of all parameters of functions that are given as `module:name`."""
    names = set()
    for key in functions:
        module, _, name = key.partition(":")
        found = _find(Entry(module, name, None, None, {}))
        if found is None:
            raise NotExplained(f"docs/published-api.toml: there is no {key}, to which keyword arguments are passed")
        names |= inspect.signature(found).parameters.keys()
    return names


def _differences(published: str, ours: inspect.Signature, passed_on: Collection[str] = ()) -> Iterator[str]:
    """Yield what a published call could not do, or would do differently.

    Args:
        published: the published signature.
        ours: our signature.
        passed_on: keyword arguments that it passes on to a function that takes them.
    """
    have = {name: p for name, p in ours.parameters.items() if name not in ("self", "cls")}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in have.values())
    places = [name for name, p in have.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for place, (name, default, positional) in enumerate(_parameters(published)):
        parameter = have.get(name)
        if parameter is None:
            passed = open_ended and name in passed_on
            yield f"`{name}` is {'read from the keyword arguments' if passed else 'not accepted'}"
            continue
        if positional and name not in places:
            yield f"`{name}` must be given by keyword"
        elif positional and places.index(name) != place:
            yield f"`{name}` is positional argument {places.index(name) + 1}, published {place + 1}"
        if default is _OPTIONAL and parameter.default is _REQUIRED:
            yield f"`{name}` is required"
        elif default not in (_OPTIONAL, _REQUIRED) and not _equal(parameter.default, default):
            shown = "required" if parameter.default is _REQUIRED else f"`{parameter.default!r}`"
            yield f"`{name}` is {shown}, published `{default!r}`"


def _equal(one: Any, other: Any) -> bool:
    one = getattr(one, "default", one) if type(one).__name__ == "Field" else one
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _parameters(text: str) -> list[tuple[str, Any, bool]]:
    """Return name, default and whether it is positional, of each parameter of a published signature."""
    arguments = ast.parse(f"def f{text[text.index('(') :]}: ...").body[0].args  # type: ignore[attr-defined]
    padding = [None] * (len(arguments.args) - len(arguments.defaults))
    pairs = [
        *((a, d, True) for a, d in zip(arguments.args, [*padding, *arguments.defaults], strict=True)),
        *((a, d, False) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)),
    ]
    return [(a.arg, _REQUIRED if d is None else _value(d), positional) for a, d, positional in pairs]


def _value(node: ast.expr) -> Any:
    value = ast.literal_eval(node)
    return _OPTIONAL if value is ... else value


def page() -> str:
    """Return the comparison as Markdown.

    Raises:
        NotExplained: a difference has no explanation, or an explanation no difference.
    """
    known = data()
    findings = [compare(entry, known["passed_to"]) for entry in entries(known["group"])]
    check(findings, known["differences"], known["absent"])
    reasons = known["differences"] | known["absent"]
    counts = {state: sum(f.state == state for f in findings) for state in ("same", "different", "absent", "later")}
    parts = [
        f"{len(findings)} published names: {counts['same']} as published, {counts['different']} with a difference, "
        f"{counts['absent']} that do not exist here, and {counts['later']} of backends that are not included yet."
    ]
    for group in known["group"]:
        of_group = [finding for finding in findings if finding.entry.group is group]
        same = sum(finding.state == _SAME for finding in of_group)
        parts.append(f"## {group['title']}\n\n`{group['module']}`: {same} of {len(of_group)} as published.")
        if group.get("later"):
            names = ", ".join(f"`{finding.entry.name}`" for finding in of_group)
            parts.append(f"Not included yet ({group['later']}): {names}.")
        rows = [
            f"| `{f.entry.name}` | {f.text or 'does not exist'} | {reasons[f.entry.key]} |"
            for f in of_group
            if f.state in ("different", _ABSENT)
        ]
        if rows:
            parts.append("\n".join(["| published name | difference | reason |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def check(findings: list[Finding], differences: dict[str, str], absent: dict[str, str]) -> None:
    """Check that exactly the differences are explained.

    Raises:
        NotExplained: lists what is wrong.
    """
    problems = []
    for state, explained in (("different", differences), (_ABSENT, absent)):
        found = {finding.entry.key: finding for finding in findings if finding.state == state}
        problems += [f"{key} is {state} and not explained: {found[key].text}" for key in found if key not in explained]
        problems += [f"the explanation of {key} is stale: it is not {state}" for key in explained if key not in found]
    if problems:
        raise NotExplained("docs/published-api.toml:\n" + "\n".join(problems))

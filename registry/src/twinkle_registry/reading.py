"""Checks every key and type of a `twinkle-plugin.toml` and reports all problems of the file at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ManifestError
from .manifest import CommandSpec, ComponentSpec, ExportSpec, HooksSpec, Manifest
from .naming import nearest_or_all, quoted

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable
    from os import PathLike

SCHEMA = 1
MAX_BYTES = 1 << 20
PLUGIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
KIND = re.compile(r"[a-z][a-z0-9_]*")
NAME = re.compile(r"\w[\w.+-]*")
_WORD = re.compile(r"[A-Za-z][\w-]*")
_COMMAND_NAME = re.compile(r"(plugins )?[A-Za-z][\w-]*")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_PUBLIC = re.compile(r"[^\W\d_]\w*")
_NAMESPACE = re.compile(r"twinkle(\.[^\W\d_]\w*)+")
_MODULE = re.compile(r"\.?([^\W\d]\w*(\.[^\W\d]\w*)*)?")
_REF = re.compile(r"(\.|\.?[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*(\.[^\W\d]\w*)*")

Check = Callable[[Any], str]
"""Returns what was expected, or an empty string for a valid value."""


def read_toml(path: str | PathLike[str] | Traversable) -> dict[str, Any]:
    """Return the raw table of one file; any failure is a `ManifestError` that names the file."""
    import tomllib

    try:
        source = path if hasattr(path, "read_bytes") else Path(path)
        data: bytes = source.read_bytes()
        if len(data) > MAX_BYTES:
            raise ManifestError(f"{path}: a manifest must have at most {MAX_BYTES} bytes, got {len(data)}")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise ManifestError(f"{path}: nested too deeply") from error
    except ValueError as error:
        raise ManifestError(f"{path}: not a TOML file in UTF-8: {error}") from error


def read_manifest(
    path: str | PathLike[str] | Traversable, dist: str, version: str, *, package: str = "", root: str = ""
) -> Manifest:
    """Read and check one manifest.

    Args:
        path: The file, or anything with `read_bytes()`, such as a member of a zipped package.
        dist: The distribution it belongs to; only for error messages, the plugin's name is in the manifest.
        version: The version that its components carry.
        package: The package that contains the manifest, as its own refs name it.
        root: The name under which that package is imported, if it differs (code from a hub). Refs into `package`
            and relative refs (`.grpo:GRPOLoss`) are rewritten to start there.

    Raises:
        ManifestError: The file cannot be read, or has any problem; all of them are listed at once.
    """
    return parse_manifest(read_toml(path), str(path), dist, version, package=package, root=root or package)


def parse_manifest(
    raw: Mapping[str, Any], where: str, dist: str, version: str, *, package: str = "", root: str = ""
) -> Manifest:
    """Check the raw table of one file and return its manifest; see `read_manifest`."""
    problems: list[str] = []
    top = Table(raw, "", problems)
    top.refuse_unknown(_TOP)
    if (schema := top.take("schema", _schema)) is not None and schema > SCHEMA:
        # A newer format may give its keys another meaning, so other problems are not reported.
        raise ManifestError(
            f"{where}: schema = {schema}, but this version reads {SCHEMA}; run: pip install -U twinkle-registry"
        )
    name = top.take("name", matches(PLUGIN, "the name of the plugin, such as 'acme-losses'"), "")
    place = _Place(name or dist, version, package, root)
    formerly = tuple(top.optional("formerly", _names(PLUGIN, "names of plugins"), ()))
    manifest = Manifest(
        schema=SCHEMA,
        core=top.take("core", _specifiers, ""),
        name=name,
        components=tuple(_component(table, place, formerly) for table in top.tables("component")),
        hooks=_hooks(top, place),
        commands=tuple(_command(table, place) for table in top.tables("command")),
        exports=tuple(_export(table, place) for table in top.tables("export")),
        formerly=formerly,
    )
    _refuse_duplicates(problems, "component", ((c.kind, c.name) for c in manifest.components))
    _refuse_duplicates(problems, "command", ((c.name,) for c in manifest.commands))
    _refuse_duplicates(problems, "export", ((e.module, e.name) for e in manifest.exports))
    if problems:
        of = f" (of {dist})" if dist else ""
        raise ManifestError(with_problems(f"{where}{of}: 0 problems", problems), manifest)
    return manifest


def with_problems(text: str, more: Iterable[str]) -> str:
    """Return the text of a `ManifestError` with further problems, one per line, and with their number updated."""
    head, *problems = [*text.split("\n  "), *more]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([re.sub(r"\b\d+ problems?$", count, head), *problems])


class _Place:
    """The package that relative refs of one manifest start from, and the plugin that offers its components."""

    def __init__(self, name: str, version: str, package: str, root: str) -> None:
        self.name, self.version, self.package, self.root = name, version, package, root

    def absolute(self, ref: str) -> str:
        module, colon, attr = ref.partition(":")
        inside = module == self.package or module.startswith(self.package + ".")
        if self.package and self.root != self.package and inside:
            module = "." + module[len(self.package) + 1 :]
        if module.startswith(".") and self.root:
            module = self.root + module if module != "." else self.root
        return module + colon + attr


class Table:
    """One table of the file; its problems go to the shared list."""

    def __init__(self, raw: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self.raw, self.where, self.problems = raw, where, problems

    def complain(self, key: str, text: str) -> None:
        """Record a problem of a key."""
        self.problems.append(f"{self.where}{'.' if self.where else ''}{key}: {text}")

    def refuse(self, key: str, expected: str) -> None:
        """Record that the value of a key is invalid."""
        name = f"{self.where}{'.' if self.where else ''}{key}"
        self.problems.append(f"{name} must be {expected}, got {_shown(self.raw[key])}")

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Record every unknown key."""
        for key in self.raw:
            if key not in known:
                self.complain(key, f"unknown key, {nearest_or_all(key, known)}")

    def take(self, key: str, check: Check, *default: Any) -> Any:
        """Return the value of a required key; if it is invalid, record a problem and return the default."""
        fallback = default[0] if default else None
        if key not in self.raw:
            self.complain(key, "missing")
            return fallback
        return self.optional(key, check, fallback)

    def optional(self, key: str, check: Check, default: Any) -> Any:
        """Return the value of an optional key; if it is absent, or invalid (which is recorded), the default."""
        if key not in self.raw:
            return default
        value = self.raw[key]
        if expected := check(value):
            self.refuse(key, expected)
            return default
        return value

    def tables(self, key: str) -> list[Table]:
        """Return the tables `[[key]]`."""
        value = self.raw.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.refuse(key, f"a list of tables [[{key}]]")
            return []
        return [Table(item, _label(key, i, item), self.problems) for i, item in enumerate(value)]


def _label(key: str, i: int, item: Mapping[str, Any]) -> str:
    name = item.get("name")
    return f"{key} #{i + 1}" + (f" {name!r}" if isinstance(name, str) else "")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _component(table: Table, place: _Place, formerly: tuple[str, ...]) -> ComponentSpec:
    table.refuse_unknown(_COMPONENT)
    return ComponentSpec(
        kind=table.take("kind", matches(KIND, "a kind such as 'loss'"), ""),
        name=table.take("name", matches(NAME, "a name without spaces, '/', ':' and '#'"), ""),
        ref=place.absolute(table.take("ref", _ref, "")),
        summary=table.optional("summary", _text, ""),
        requires=tuple(table.optional("requires", _requirements, ())),
        runtimes=tuple(table.optional("runtimes", _names(_WORD, "runtime names"), ("local",))),
        tenant_safe=table.optional("tenant_safe", _boolean, False),
        inputs=dict(table.optional("inputs", _inputs, {})),
        config=place.absolute(table.optional("config", _ref, "")),
        dist=place.name,
        version=place.version,
        root=place.root,
        example=place.absolute(table.optional("example", _ref, "")),
        formerly=formerly,
    )


def _command(table: Table, place: _Place) -> CommandSpec:
    table.refuse_unknown(_COMMAND)
    return CommandSpec(
        name=table.take("name", matches(_COMMAND_NAME, "a command name, such as 'report' or 'plugins report'"), ""),
        ref=place.absolute(table.take("ref", _ref, "")),
        summary=table.optional("summary", _text, ""),
        dist=place.name,
    )


def _export(table: Table, place: _Place) -> ExportSpec:
    table.refuse_unknown(_EXPORT)
    return ExportSpec(
        module=table.take("module", matches(_NAMESPACE, "a module of core, such as 'twinkle.kernel'"), ""),
        name=table.take("name", matches(_PUBLIC, "a public identifier"), ""),
        ref=place.absolute(table.take("ref", _ref, "")),
        dist=place.name,
    )


def _hooks(top: Table, place: _Place) -> HooksSpec | None:
    value = top.raw.get("hooks")
    if value is None:
        return None
    if not isinstance(value, dict):
        top.refuse("hooks", f"a table with {quoted(_HOOKS)}")
        return None
    table = Table(value, "hooks", top.problems)
    table.refuse_unknown(_HOOKS)
    module = table.take("module", _module, "")
    implements = table.take("implements", _names(_IDENTIFIER, "hook names"), ())
    return HooksSpec(place.absolute(module), tuple(implements))


def _refuse_duplicates(problems: list[str], what: str, keys: Iterable[tuple[str, ...]]) -> None:
    seen = set()
    for key in keys:
        if key in seen and all(key):
            problems.append(f"{what}: {' '.join(key)} is listed twice")
        seen.add(key)


def _schema(value: Any) -> str:
    return "" if type(value) is int and value >= SCHEMA else f"the number {SCHEMA}"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "a string"


def _boolean(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def matches(pattern: re.Pattern[str], what: str) -> Check:
    """Return a check for strings that fully match the pattern; `what` describes valid values in errors."""
    return lambda value: "" if isinstance(value, str) and pattern.fullmatch(value) else what


def _ref(value: Any) -> str:
    return "" if isinstance(value, str) and _REF.fullmatch(value) else "'package.module:Attr'"


def _module(value: Any) -> str:
    return "" if isinstance(value, str) and value and _MODULE.fullmatch(value) else "a module such as 'acme.hooks'"


def _names(pattern: re.Pattern[str], what: str) -> Check:
    def check(value: Any) -> str:
        fine = isinstance(value, list) and all(isinstance(v, str) and pattern.fullmatch(v) for v in value)
        return "" if fine and value and len(set(value)) == len(value) else f"a list of distinct {what}"

    return check


def _inputs(value: Any) -> str:
    fine = isinstance(value, dict) and all(
        _IDENTIFIER.fullmatch(key) and isinstance(dtype, str) and dtype for key, dtype in value.items()
    )
    return "" if fine else 'a table of argument to type, such as { advantages = "float32[T]" }'


def _specifiers(value: Any) -> str:
    expected = "versions of twinkle-core such as '>=0.1,<1'"
    if not isinstance(value, str):
        return expected
    return "" if _is_specifier(value) else expected


@lru_cache(maxsize=256)
def _is_specifier(text: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return len(SpecifierSet(text)) > 0
    except InvalidSpecifier:
        return False


def _requirements(value: Any) -> str:
    expected = "a list of requirements such as 'torch>=2.6'"
    if not isinstance(value, list):
        return expected
    for item in value:
        if not isinstance(item, str):
            return expected
        if not _is_requirement(item):
            return f"{expected}, but {item!r} is not one"
    return ""


@lru_cache(maxsize=256)
def _is_requirement(text: str) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement:
        return False
    return True


_TOP = ("schema", "core", "name", "hooks", "formerly", "component", "command", "export")
_HOOKS = ("module", "implements")
_COMMAND = ("name", "ref", "summary")
_EXPORT = ("module", "name", "ref")
_COMPONENT = (
    "kind",
    "name",
    "ref",
    "summary",
    "requires",
    "runtimes",
    "tenant_safe",
    "inputs",
    "config",
    "example",
)

"""Records for the content of a manifest, `twinkle-plugin.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .naming import canonical

if TYPE_CHECKING:
    pass

MANIFEST_NAME = "twinkle-plugin.toml"
Status = Literal["ok", "broken", "incompatible", "disabled"]


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One component that a plugin offers; it is not imported yet.

    Attributes:
        kind: `loss`, `sampler`, `patch`, …
        name: Its name in scripts.
        ref: Where it is defined: `package.module:Attr`. A ref that starts with a dot is relative to `root`.
        summary: One line of description.
        requires: Requirement specifiers (PEP 508), checked before the import.
        runtimes: The runtimes it works in.
        tenant_safe: It keeps no global state and may run inside the multi-tenant server.
        inputs: Per-row arguments beside labels and logps, with dtype and shape: `{"advantages": "float32[T]"}`.
        config: Its options model (`package.module:Attr`), or empty.
        dist: The name of the plugin, the `dist` of `dist/Name`.
        version: The version of the plugin.
        root: The package that relative refs start from.
        example: Function that returns an example for the contract kit (`package.module:function`), or empty.
        formerly: Names of plugins that offered the component in earlier releases; `dist/Name` and `prefer` accept them.
    """

    kind: str
    name: str
    ref: str
    summary: str = ""
    requires: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ("local",)
    tenant_safe: bool = False
    inputs: Mapping[str, str] = field(default_factory=dict, hash=False)
    config: str = ""
    dist: str = ""
    version: str = ""
    root: str = ""
    example: str = ""
    formerly: tuple[str, ...] = ()

    def offered_as(self, dist: str) -> bool:
        """Return whether the plugin `dist` offers it, or did so in an earlier release."""
        return canonical(dist) in map(canonical, (self.dist, *self.formerly))

    def __str__(self) -> str:
        """Return how errors name it: `loss 'GRPOLoss' of twinkle-losses`."""
        return f"{self.kind} {self.name!r}" + (f" of {self.dist}" if self.dist else "")


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One subcommand of `twinkle`, imported when it is run: `ref` is a callable that takes the arguments."""

    name: str
    ref: str
    summary: str = ""
    dist: str = ""


@dataclass(frozen=True, slots=True)
class ExportSpec:
    """One function or class that a plugin adds to a public namespace of core, imported when it is first used.

    Attributes:
        module: The namespace, such as `twinkle.kernel`.
        name: The attribute of that module.
        ref: Where the object is defined: `package.module:Attr`.
        dist: The name of the plugin.
    """

    module: str
    name: str
    ref: str
    dist: str = ""


@dataclass(frozen=True, slots=True)
class HooksSpec:
    """The lifecycle hooks of a plugin: the module that holds them, imported at the first call of one of them."""

    module: str
    implements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One `twinkle-plugin.toml`, checked."""

    schema: int
    core: str
    name: str
    components: tuple[ComponentSpec, ...] = ()
    hooks: HooksSpec | None = None
    commands: tuple[CommandSpec, ...] = ()
    exports: tuple[ExportSpec, ...] = ()
    formerly: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin, usable or not.

    Attributes:
        dist: The distribution (pip) or the repository or folder it came from.
        version: Its version, or the commit.
        package: The importable package.
        location: The path of its manifest; empty if there is none.
        manifest: What it offers; `None` where the manifest could not be read.
        status: `ok`, `broken`, `incompatible` (with this version of core) or `disabled` (by settings).
        reason: Why it is not `ok`, and what to do; empty if it is.
        cause: The error behind the reason, if there was one.
    """

    dist: str
    version: str
    package: str
    location: str
    manifest: Manifest | None = None
    status: Status = "ok"
    reason: str = ""
    cause: BaseException | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The name of the plugin: the manifest's, or the distribution's where there is no manifest."""
        return self.manifest.name if self.manifest is not None else self.dist


def manifest_to_rows(manifest: Manifest) -> list[Any]:
    """Return the manifest as JSON-ready rows without keys, which read twice as fast; see `manifest_from_rows`."""
    from dataclasses import astuple

    return list(astuple(manifest))


def manifest_from_rows(rows: Sequence[Any]) -> Manifest:
    """Rebuild a manifest that `manifest_to_rows` wrote, without any check."""
    schema, core, name, components, hooks, commands, exports, formerly = rows
    specs = tuple(
        ComponentSpec(kind, label, ref, summary, tuple(requires), tuple(runtimes), *(*rest, tuple(formerly)))
        for kind, label, ref, summary, requires, runtimes, *rest, formerly in components
    )
    lifecycle = HooksSpec(hooks[0], tuple(hooks[1])) if hooks else None
    return Manifest(
        schema,
        core,
        name,
        specs,
        lifecycle,
        tuple(CommandSpec(*row) for row in commands),
        tuple(ExportSpec(*row) for row in exports),
        tuple(formerly),
    )

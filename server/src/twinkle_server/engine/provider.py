"""Selection of the engine: a component of kind `engine`, by name or reference."""

from twinkle import registry
from twinkle.errors import ComponentConflict, ComponentNotFound
from twinkle_registry import check_requirements


def engine_name(backend: str | None) -> str:
    """Return the name of the engine: the given one, or the only one that is installed.

    Raises:
        ComponentNotFound: no engine was given, and none is installed.
        ComponentConflict: no engine was given, and several are installed.
    """
    if backend is not None:
        return backend
    names = registry().names("engine")
    if not names:
        from twinkle_registry.index import search

        published = ", ".join(f"{entry.name}: {entry.command}" for entry in search((), "engine"))
        raise ComponentNotFound(f"no engine is installed; install one of: {published}")
    if len(names) > 1:
        raise ComponentConflict(f"several engines are installed: {', '.join(names)}; choose one with --backend NAME")
    return names[0]


def check_installed(backend: str | None) -> None:
    """Check that an engine's requirements are installed, without importing it.

    A reference such as `package.module:Class` or `./file.py:Class` has no manifest; nothing can be checked before
    its import.

    Raises:
        ComponentNotFound: no plugin offers the engine.
        RequirementMissing: the engine needs a package that is not installed.
    """
    name = engine_name(backend)
    if ":" not in name:
        check_requirements(registry().find(name, "engine"))

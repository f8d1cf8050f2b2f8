"""Selection of the engine: a component of kind `engine`, by name or reference."""

from typing import Any

from twinkle import registry
from twinkle.errors import ComponentConflict, ComponentNotFound, ConfigError
from twinkle_registry import check_keywords, check_requirements
from twinkle_server.settings import Settings


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


def engine_options(settings: Settings) -> dict[str, Any]:
    """Return the arguments with which the engine is built.

    Raises:
        ConfigError: an option is a setting of the service itself.
    """
    options = {"model_id": settings.model, "pass_tokens": settings.pass_tokens}
    if twice := sorted(options.keys() & settings.extra.keys()):
        raise ConfigError(
            f"engine.options must not contain {', '.join(twice)}: these are settings of the service itself"
        )
    return {**options, **settings.extra}


def check_options(settings: Settings) -> None:
    """Compare the options of the engine with the signature of its class; imports the engine if there are any.

    Raises:
        ConfigError: an option is a setting of the service itself.
        ArgumentError: the engine does not take an option.
        TwinkleError: the engine cannot be imported.
    """
    options = engine_options(settings)
    if settings.extra:
        name = engine_name(settings.backend)
        engine = registry().resolve(name, "engine")
        if isinstance(engine, type):
            check_keywords(engine, options, what=f"engine {name!r}")

"""Components that the script of a server defines: tenants name them as they name those of a plugin.

The processes of a service cannot see the objects of the script that started it. So its components become a plugin of
their own, a folder on the path of all these processes, which imports the script under another name. The script does not
serve again there: `launch_server` ends the import.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from twinkle import registry
from twinkle.errors import ConfigError
from twinkle_registry.discovery import installed_plugins

NAME: Final = "twinkle-script"
_PACKAGE: Final = "twinkle_script"
KINDS: Final = ("loss", "metric", "reward", "template", "preprocessor", "filter", "processor", "optimizer", "scheduler")
"""Kinds of components that requests may name."""
_MODULE: Final = '''"""Components of the script that started the service."""

from twinkle_server.launch.script import load

globals().update(load({path!r}, {names!r}, {arguments!r}))
'''
_MANIFEST: Final = f'schema = 1\ncore = ">=0.1"\nname = "{NAME}"\n'
_COMPONENT: Final = """
[[component]]
kind = "{kind}"
name = "{name}"
ref = "{package}:{name}"
summary = "Defined in the script that started the service"
runtimes = ["local", "served"]
tenant_safe = true
"""
_loading = False


class ScriptServes(BaseException):
    """Raised by `launch_server` where a process of the service imports the script that started it."""


def check_not_loading() -> None:
    """End the import of a script in a process of the service, which must not start another service.

    Raises:
        ScriptServes: a script is being imported.
    """
    if _loading:
        raise ScriptServes


def components_of(module: ModuleType) -> dict[str, str]:
    """Return the kind of each component class that a module defines itself, by name; private ones are left out."""
    found = {}
    for name, value in vars(module).items():
        own = isinstance(value, type) and value.__module__ == module.__name__ and value.__qualname__ == name
        if own and not name.startswith("_") and (kind := _kind_of(value)) is not None:
            found[name] = kind
    return found


def _kind_of(cls: type) -> str | None:
    """Return the kind whose contract, or one of whose components, a class derives from."""
    bases = {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__[1:]}
    for kind in KINDS:
        contract = registry().contract(kind)
        references = {spec.ref for specs in registry().specs(kind).values() for spec in specs}
        if contract in cls.__mro__[1:] or bases & references:
            return kind
    return None


def load(path: str, names: list[str], arguments: list[str]) -> dict[str, Any]:
    """Import a script under another name than `__main__`, and return some of its attributes.

    Args:
        path: of the script.
        names: of the attributes.
        arguments: with which the script was started; it finds them in `sys.argv`.

    Raises:
        ConfigError: the script does not define one of them before it serves.
    """
    global _loading
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.script", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"cannot import the components of {Path(path).name}: it is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before, _loading = _loading, True
    own, sys.argv = sys.argv, [path, *arguments]
    try:
        with _same_runtime(), contextlib.suppress(ScriptServes):
            spec.loader.exec_module(module)
    finally:
        _loading, sys.argv = before, own
    if missing := [name for name in names if not hasattr(module, name)]:
        raise ConfigError(
            f"{Path(path).name} does not define {missing[0]!r} when it is imported; define components outside of "
            "`if __name__ == '__main__':`"
        )
    return {name: getattr(module, name) for name in names}


@contextlib.contextmanager
def _same_runtime() -> Iterator[None]:
    """Undo a call of `twinkle.initialize` in the script: this process has its own runtime."""
    from twinkle.runtime import current

    before = current._current
    try:
        yield
    finally:
        current._current = before


@contextlib.contextmanager
def offered() -> Iterator[tuple[str, ...]]:
    """Offer the components of the running script to this process and its children, and yield the name of their plugin.

    Nothing is offered if the program is not a script, or defines no components.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    names = components_of(main) if path and not getattr(main, "__spec__", None) else {}
    if not names or path is None:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="twinkle-script-") as folder:
        write_plugin(Path(folder), Path(path).absolute(), names, sys.argv[1:])
        with _on_path(folder):
            for record in installed_plugins():
                registry().add(record)
            yield (NAME,)


def write_plugin(folder: Path, script: Path, names: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Write a plugin with the components of a script, given their kinds by name, as an installed distribution."""
    package, about = folder / _PACKAGE, folder / f"{_PACKAGE}-0.1.dist-info"
    package.mkdir()
    about.mkdir()
    code = _MODULE.format(path=str(script), names=sorted(names), arguments=list(arguments))
    (package / "__init__.py").write_text(code, "utf-8")
    rows = [_COMPONENT.format(kind=kind, name=name, package=_PACKAGE) for name, kind in sorted(names.items())]
    (package / "twinkle-plugin.toml").write_text(_MANIFEST + "".join(rows), "utf-8")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.1\n", "utf-8")
    (about / "entry_points.txt").write_text(f"[twinkle]\n{NAME} = {_PACKAGE}\n", "utf-8")


@contextlib.contextmanager
def _on_path(folder: str) -> Iterator[None]:
    """Put a folder on the path of this process and of those that it starts."""
    before = os.environ.get("PYTHONPATH")
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = folder if not before else os.pathsep.join([before, folder])
    try:
        yield
    finally:
        sys.path.remove(folder)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before

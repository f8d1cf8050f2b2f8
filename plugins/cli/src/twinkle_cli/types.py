"""`twinkle plugins types`: a stub package (PEP 561, partial) that shows installed components to type checkers.

The public modules of core find components through the registry at run time, which type checkers cannot follow.
A stub of such a module is its own source, with an import for each component and export that installed plugins offer.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

PACKAGE = "twinkle-stubs"
HEAD = "# Written by `twinkle plugins types`; do not edit.\n"


@click.command("types", short_help="Write type stubs for the names that installed plugins offer.")
@click.option(
    "--to", "folder", type=click.Path(file_okay=False, path_type=Path), help="Target folder; by default site-packages."
)
def types(folder: Path | None) -> None:
    """Write the package `twinkle-stubs`, so that editors and mypy know every name that installed plugins offer.

    Run it again after plugins were installed or removed.
    """
    import sysconfig

    from twinkle._registry import registry

    records = [record for record in registry().records if record.status == "ok" and record.manifest is not None]
    offered: dict[str, dict[str, str]] = {}
    for record in records:
        assert record.manifest is not None
        for spec in record.manifest.components:
            offered.setdefault(f"twinkle.{spec.kind}", {})[spec.name] = spec.ref
        for export in record.manifest.exports:
            offered.setdefault(export.module, {})[export.name] = export.ref
    target = Path(sysconfig.get_path("purelib")) if folder is None else folder
    count = write_stubs(target / PACKAGE, offered)
    click.echo(f"{target / PACKAGE}: {count} names of {len(records)} plugins")


def write_stubs(package: Path, offered: Mapping[str, Mapping[str, str]]) -> int:
    """Write the stub package and return the number of names in it.

    Args:
        package: its folder; files of an earlier run are replaced.
        offered: names and their `package.module:Attr`, by the public module that shows them.
    """
    import shutil

    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    (package / "py.typed").write_text("partial\n")
    count = 0
    for relative, text, names in stubs(offered):
        path = package / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        count += names
    return count


def stubs(offered: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str, int]]:
    """Yield for each public module the path of its stub below the package, the stub, and how many names it adds."""
    for module in sorted(offered):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        path = module.removeprefix("twinkle.").replace(".", "/")
        path += "/__init__.pyi" if spec.submodule_search_locations is not None else ".pyi"
        refs = {name: ref for name, ref in offered[module].items() if _importable(name, ref)}
        lines = sorted(_import(name, ref) for name, ref in refs.items())
        aliases = [f"{name} = _{name}\n" for name, ref in sorted(refs.items()) if ref.partition(":")[2] != name]
        static = _static(Path(spec.origin).read_text("utf-8"))
        yield path, HEAD + "\n".join([static, "".join([*lines, *aliases])]), len(lines)


def _importable(name: str, ref: str) -> bool:
    return name.isidentifier() and "." not in ref.partition(":")[2] and not ref.startswith(".")


def _import(name: str, ref: str) -> str:
    module, _, attribute = ref.partition(":")
    # A stub exports what it imports under the same name; another name needs an assignment (PEP 484).
    return f"from {module} import {attribute} as {name if name == attribute else '_' + name}\n"


def _static(source: str) -> str:
    """Return the source of a module without its lazy attribute access."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        targets = node.targets[0] if isinstance(node, ast.Assign) else None
        names = [target.id for target in ast.walk(targets) if isinstance(target, ast.Name)] if targets else []
        if "__getattr__" in names:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)

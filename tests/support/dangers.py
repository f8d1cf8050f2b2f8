"""Finds calls by which data becomes code or leaves its folder; follows names through imports, not through values."""

import ast
from collections.abc import Iterator

_PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_NEVER = {
    *("eval", "exec", "__import__", "os.system", "os.popen"),
    *("torch.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
}
_SWITCHES = {"allow_pickle": False, "weights_only": True, "trust_remote_code": False, "shell": False}
"""Arguments that mean danger unless they are this."""
_UNPACK = {"extract", "extractall", "unpack_archive"}


def dangers(source: str) -> list[str]:
    """Return what is dangerous in a source text, as "line: what", in order of lines."""
    nodes = list(ast.walk(ast.parse(source)))
    names = dict(name for node in nodes for name in _bound(node))
    found = {(node.lineno, what) for node in nodes for what in _dangers(node, names)}  # type: ignore[attr-defined]
    return [f"{line}: {what}" for line, what in sorted(found)]


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a name stands for after an import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dangers(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in _PICKLES)
    elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in _PICKLES:
        yield f"import {node.module}"
    elif isinstance(node, ast.Call):
        yield from _of_call(node, _dotted(node.func, names))


def _of_call(node: ast.Call, name: str) -> Iterator[str]:
    given = {item.arg: item.value for item in node.keywords if item.arg}
    if name in _NEVER:
        yield name
    if name == "importlib.import_module" and any(
        _is(argument, pickle) for argument in node.args for pickle in _PICKLES
    ):
        yield "import of a pickle by its name"
    if name.rpartition(".")[2] in _UNPACK and "filter" not in given:
        yield f"{name.rpartition('.')[2]} without filter"
    yield from (f"{key}={ast.unparse(given[key])}" for key, good in _SWITCHES.items() if not _is(given.get(key), good))


def _is(value: ast.expr | None, good: object) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value == good)


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return the name that is called, with its module; of a method of something unknown, a dot and the method's."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return ""

"""Measure the simulation: make mutants of the store and the runtime, and count those that it finds.

`python scripts/mutants.py --sample 150 --seeds 1000` draws mutants with a fixed seed; `--sample 0` runs all of them. A
mutant is found when the simulation of a seed fails. Seeds that execute the mutated line run first. Mutants on
lines that no simulation executes are reported and count as not found.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "server" / "src"
PACKAGES = ("store", "runtime")
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "server" / "tests" / "simulation")]

SKIPPED = {
    "twinkle_server/store/memory.py": "a journal for benchmarks, which no service uses",
    "twinkle_server/store/migrations": "history; a test compares what migrations make with the tables",
    "twinkle_server/store/tables.py": "declarations; a test compares them with the migrations",
}
"""Modules that are no part of the service that is simulated."""
REPLACED = {
    ("twinkle_server/runtime/supervision.py", "ChildProcess"): "the simulated engine takes its place",
    ("twinkle_server/runtime/supervision.py", "is_stopped"): "reads the state of a real process",
    ("twinkle_server/store/database.py", "_run"): "the loop of the writing thread, which does not run here",
    ("twinkle_server/store/database.py", "_wake_writer"): "starts that thread",
    ("twinkle_server/runtime/core.py", "_starter"): "starts that process",
}
"""Code that a part of the simulation replaces; tests with real processes and threads cover it."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one place.

    Attributes:
        path: of the module, below `server/src`.
        line: of the change.
        what: was changed.
        text: of the whole module.
    """

    path: str
    line: int
    what: str
    text: str

    @property
    def name(self) -> str:
        """How it is called in reports."""
        return f"{self.path}:{self.line} {self.what}"


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield what can be changed at a node: a description, and a function that makes the change in a copy."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            other = COMPARISONS.get(type(operator))
            if other is not None:
                yield f"{type(operator).__name__} -> {other.__name__}", _set(node, "ops", place, other())
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{type(node.op).__name__} -> {type(other_op).__name__}", _set(node, "op", None, other_op)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", ("replace", node, node.operand)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other_bin = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        if not _is_text(node):
            yield f"{type(node.op).__name__} -> {type(other_bin).__name__}", _set(node, "op", None, other_bin)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", _set(node, "value", None, not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} -> {node.value + 1}", _set(node, "value", None, node.value + 1)
    elif isinstance(node, ast.If) or (isinstance(node, ast.While) and not isinstance(node.test, ast.Constant)):
        yield "condition negated", _set(node, "test", None, ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", ("swap", node, None)
    elif (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)) or isinstance(
        node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break
    ):
        yield "statement deleted", ("replace", node, ast.Pass())
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", _set(node, "value", None, ast.Constant(None))


def _set(node: ast.AST, field: str, place: int | None, value: Any) -> Any:
    return ("set", node, (field, place, value))


def _is_text(node: ast.BinOp) -> bool:
    parts = (node.left, node.right)
    return any(isinstance(part, ast.JoinedStr | ast.List | ast.ListComp) or _is_string(part) for part in parts)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _apply(tree: ast.Module, change: Any) -> str:
    """Make a change, write the module, and undo it."""
    action, node, details = change
    if action == "set":
        field, place, value = details
        holder = node if place is None else getattr(node, field)
        before = getattr(node, field) if place is None else holder[place]
        _put(holder, field, place, value)
        text = ast.unparse(ast.fix_missing_locations(tree))
        _put(holder, field, place, before)
        return text
    if action == "swap":
        node.body, node.orelse = node.orelse, node.body
        text = ast.unparse(tree)
        node.body, node.orelse = node.orelse, node.body
        return text
    parent, field, place = _parent_of(tree, node)
    holder = parent if place is None else getattr(parent, field)
    _put(holder, field, place, details)
    text = ast.unparse(ast.fix_missing_locations(tree))
    _put(holder, field, place, node)
    return text


def _put(holder: Any, field: str, place: int | None, value: Any) -> None:
    if place is None:
        setattr(holder, field, value)
    else:
        holder[place] = value


def _parent_of(tree: ast.Module, wanted: ast.AST) -> tuple[Any, str, int | None]:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is wanted:
                return parent, field, None
            if isinstance(value, list):
                for place, item in enumerate(value):
                    if item is wanted:
                        return parent, field, place
    raise LookupError("the node is not in the tree")


def _nodes(tree: ast.Module, path: str) -> Iterator[ast.AST]:
    """Yield the nodes that may be changed: no annotations, no defaults of declarations, nothing that is replaced."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if (path, node.name) in REPLACED:
                return
            for item in node.body:
                yield from visit(item)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from visit(node.value)
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    for item in tree.body:
        yield from visit(item)


def mutants() -> list[Mutant]:
    """Return all mutants."""
    found = []
    for package in PACKAGES:
        for file in sorted((SOURCE / "twinkle_server" / package).rglob("*.py")):
            path = file.relative_to(SOURCE).as_posix()
            if any(path.startswith(skipped) for skipped in SKIPPED):
                continue
            tree = ast.parse(file.read_text("utf-8"))
            for node in list(_nodes(tree, path)):
                for what, change in changes(node):
                    found.append(Mutant(path, getattr(node, "lineno", 0), what, _apply(tree, change)))
    return found


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from the text of a mutant."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the module."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, SOURCE / self._mutant.path, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """Let the import system make the module."""

    def exec_module(self, module: Any) -> None:
        """Run the mutant's text."""
        exec(compile(self._mutant.text, str(SOURCE / self._mutant.path), "exec"), vars(module))


def preload() -> None:
    """Import what mutants share, and nothing of the service."""
    import alembic.config  # noqa: F401
    import fastapi  # noqa: F401
    import google.protobuf.message  # noqa: F401
    import numpy  # noqa: F401
    import sqlalchemy.dialects.sqlite  # noqa: F401
    import starlette.requests  # noqa: F401
    import structlog  # noqa: F401

    import twinkle.engine  # noqa: F401


def in_child(work: Any, seconds: float) -> tuple[str, int]:
    """Run a function in a forked process; return its words, or how the process ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        words = work()
        os.write(writer, words.encode("utf-8", "replace")[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        words = file.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    return words, status


def hunt(mutant: Mutant, seeds: Sequence[int], seconds: float) -> str:
    """Return how the simulation found a mutant; "" if it did not."""

    def work() -> str:
        sys.meta_path.insert(0, Importer(mutant))
        try:
            from service_simulation.simulation import simulate
        except Exception as error:
            return f"import: {error!r}"
        for seed in seeds:
            signal.alarm(60)
            try:
                simulate(seed)
            except BaseException as error:
                return f"seed {seed}: {type(error).__name__}: {str(error)[:200]}"
        return "survived"

    words, status = in_child(work, seconds)
    if words == "survived" or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return ""  # what takes as long as all seeds may be slow rather than wrong
    return words or f"the process ended with status {status}"


def lines_of(seeds: Sequence[int]) -> dict[str, dict[int, list[int]]]:
    """Return which seeds execute which lines of which module; made once, in a child."""

    def work() -> str:
        import threading

        current: set[tuple[str, int]] = set()
        wanted = tuple(str(SOURCE / "twinkle_server" / package) for package in PACKAGES)

        def local(frame: Any, event: str, _argument: Any) -> Any:
            if event == "line":
                current.add((frame.f_code.co_filename, frame.f_lineno))
            return local

        def trace(frame: Any, _event: str, _argument: Any) -> Any:
            return local if frame.f_code.co_filename.startswith(wanted) else None

        threading.settrace(trace)
        sys.settrace(trace)
        from service_simulation.simulation import simulate

        found: dict[str, dict[int, list[int]]] = {}
        for seed in (-1, *seeds):
            if seed >= 0:
                simulate(seed)
            for file, line in current:
                path = Path(file).relative_to(SOURCE).as_posix()
                found.setdefault(path, {}).setdefault(line, []).append(seed)
            current.clear()
        LINES.write_text(json.dumps(found))
        return "done"

    words, status = in_child(work, 3600)
    if words != "done":
        raise SystemExit(f"the lines of simulations could not be read: {words} {status}")
    read = json.loads(LINES.read_text())
    return {path: {int(line): seeds for line, seeds in lines.items()} for path, lines in read.items()}


LINES = ROOT / ".mutant-lines.json"


def main() -> int:
    """Run, and return the exit status: 1 if less than 95 % were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=150, help="mutants to draw; 0 is all")
    parser.add_argument("--draw", type=int, default=15, help="seed of the draw")
    parser.add_argument("--seeds", type=int, default=1000, help="simulations of each mutant")
    parser.add_argument("--lines", type=int, default=60, help="simulations of which the lines are recorded")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="list mutants and run none")
    parser.add_argument("--seconds", type=float, default=3600.0, help="CPU time of the simulations of one mutant")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if options.only in mutant.name]
    total = len(chosen)
    if options.sample and options.sample < total:
        chosen = random.Random(options.draw).sample(chosen, options.sample)
    print(f"{total} mutants, of which {len(chosen)} run", flush=True)
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    preload()
    lines = lines_of(range(options.lines))
    survivors, begin = [], time.monotonic()
    for place, mutant in enumerate(sorted(chosen, key=lambda each: each.name)):
        executed = lines.get(mutant.path, {}).get(mutant.line, [])
        first = [seed for seed in executed if seed >= 0]
        rest = [seed for seed in range(options.seeds) if seed not in set(first)]
        found = hunt(mutant, [*first, *rest], options.seconds) if executed else ""
        if not found:
            survivors.append(mutant.name)
        never = "" if executed else " (no simulation executes it)"
        print(f"{place + 1:4} {'found' if found else 'SURVIVED' + never:9} {mutant.name}  {found[:160]!r}", flush=True)
    share = 1 - len(survivors) / len(chosen)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found: {share:.1%}, in {time.monotonic() - begin:.0f} s")
    print("\n".join(["not found:", *survivors]))
    return share < 0.95


if __name__ == "__main__":
    sys.exit(main())

"""Measure the simulation: make mutants of the store, the runtime and the native calls, and count those that it finds.

`python scripts/mutants.py --sample 150 --seeds 1000` draws mutants with a fixed seed; `--sample 0` runs all of them. A
mutant is found when the simulation of a seed fails. Seeds that execute the mutated function run first. Mutants that
change nothing that is promised are excluded, by a rule (`RULES`) or by name with a reason (`EQUIVALENT`).
"""

import argparse
import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from equivalent_mutants import EQUIVALENT

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "server" / "src"
PACKAGES = ("store", "runtime", "native", "engine/native")
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "server" / "tests" / "simulation"), str(ROOT / "scripts")]

SKIPPED = {
    "runs": "lists, which the simulated native client does not ask for",
    "sampling": "native sampling, whose operations are those of the Tinker protocol",
    "templates": "the simulated model has no tokenizer",
    "memory": "a journal for benchmarks, which no service uses",
    "migrations": "history; a test compares what migrations make with the tables",
    "tables": "declarations; a test compares them with the migrations",
}
"""Modules and packages that are no part of the service that is simulated."""
REPLACED = {
    "ChildProcess": "the simulated engine takes its place",
    "is_stopped": "reads the state of a real process",
    "SqliteDatabase._run": "the loop of the writing thread, which does not run here",
    "SqliteDatabase._wake_writer": "starts that thread",
    "_starter": "starts the engine's process",
}
"""Code that a part of the simulation replaces; tests with real processes and threads cover it."""
RULES = {
    "log": "only what the log says differs",
    "text": "only the length of a quotation in a message differs",
    "hint": "the pause that a client is told differs by a second",
    "limit": "a time limit or size that is a constant of a module differs by one",
    "chore": "a chore is done a little more often or more seldom",
}
"""Kinds of mutants that change nothing that is promised."""
SECONDS, PART_SECONDS = 15.0, 5.0
"""CPU time after which a simulation, which takes about one second, or a part, which takes a tenth, counts as failed."""
_CHUNK = 25  # seeds of one process
AGAIN = ("twinkle_server", "twinkle_client", "service_simulation", "ledger_engine")
"""Packages that are imported anew for a mutant that is not of one function's code."""
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
        function: qualified name of the function or class around it; "" at the module's level.
        source: text of the line.
        place: of the change among all changes of the module.
        rule: why changes of this kind change nothing that is promised; "" if no rule says so.
    """

    path: str
    line: int
    what: str
    function: str
    source: str
    place: int
    rule: str

    @property
    def name(self) -> str:
        """How it is called in reports."""
        return f"{self.path}:{self.line} {self.what}"

    @property
    def reason(self) -> str:
        """Why nothing that is promised changes: a rule, or an entry of the table."""
        if self.rule:
            return self.rule
        for entry in EQUIVALENT:
            if entry.matches(self):
                return entry.reason
        return ""

    def text(self) -> str:
        """Return the changed module."""
        tree = ast.parse((SOURCE / self.path).read_text("utf-8"))
        return _apply(tree, next(itertools.islice(_changes_of(tree), self.place, None)).change)


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


@dataclass(frozen=True, slots=True)
class _Change:
    node: ast.AST
    function: str
    rule: str
    what: str
    change: Any


def _changes_of(tree: ast.Module) -> Iterator[_Change]:
    """Yield all changes of a module: not of annotations, of defaults of declarations, or of what is replaced."""

    def visit(node: ast.AST, function: str, local: bool, rule: str, parent: ast.AST | None = None) -> Iterator[_Change]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = function if local else f"{function}.{node.name}".lstrip(".")
            if inner not in REPLACED:
                for item in node.body:
                    yield from visit(item, inner, local or not isinstance(node, ast.ClassDef), rule)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from visit(node.value, function, local, rule or _rule(node, function))
            return
        rule = rule or _rule(node, function)
        for what, change in changes(node):
            yield _Change(node, function, rule or _rule_of_condition(node) or _rule_of_hint(node, parent), what, change)
        for field, value in ast.iter_fields(node):
            only_logs = field == "test" and _is_pure(value) and bool(_rule_of_condition(node))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, function, local, RULES["log"] if only_logs else rule, node)

    for item in tree.body:
        yield from visit(item, "", False, "")


def _rule(node: ast.AST, function: str) -> str:
    """Return why no change of a node, or below it, matters; "" if no rule says so."""
    if _is_log(node):
        return RULES["log"]
    if isinstance(node, ast.keyword) and node.arg == "retry_after":
        return RULES["hint"]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.janitor.add":
        return RULES["chore"]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Subscript):
        return RULES["text"]
    if isinstance(node, ast.AnnAssign | ast.Assign) and not function and node.value is not None:
        leaves = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
        if leaves and all(isinstance(each, int | float) for each in leaves):
            return RULES["limit"]
    return ""


def _rule_of_condition(node: ast.AST) -> str:
    if isinstance(node, ast.If) and not node.orelse and all(_is_log(each) for each in node.body):
        return RULES["log"]
    return ""


def _rule_of_hint(node: ast.AST, parent: ast.AST | None) -> str:
    called = parent.func if isinstance(node, ast.Constant) and isinstance(parent, ast.Call) else None
    return RULES["hint"] if isinstance(called, ast.Name) and called.id == "Unavailable" else ""


def _is_log(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    if isinstance(called, ast.Name) and called.id == "log_ended":
        return True
    name = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
    return name.lower() in ("_log", "_engine_log")


def _is_pure(node: ast.AST) -> bool:
    return not any(isinstance(each, ast.Call | ast.NamedExpr | ast.Await) for each in ast.walk(node))


def mutants() -> list[Mutant]:
    """Return all mutants."""
    found = []
    for package in PACKAGES:
        for file in sorted((SOURCE / "twinkle_server" / package).rglob("*.py")):
            path = file.relative_to(SOURCE).as_posix()
            if not SKIPPED.keys().isdisjoint(Path(path).with_suffix("").parts):
                continue
            text = file.read_text("utf-8")
            lines = text.splitlines()
            for place, each in enumerate(_changes_of(ast.parse(text))):
                line = getattr(each.node, "lineno", 0)
                source = lines[line - 1].strip() if line else ""
                found.append(Mutant(path, line, each.what, each.function, source, place, each.rule))
    return found


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from the text of a mutant."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text
        self._name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the module."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, SOURCE / self._path, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """Let the import system make the module."""

    def exec_module(self, module: Any) -> None:
        """Run the mutant's text."""
        exec(compile(self._text, str(SOURCE / self._path), "exec"), vars(module))


class Functions:
    """The functions of the service, which are in memory: most mutants replace the code of one of them.

    Attributes:
        seeds: those that call a function, by file and qualified name.
        parts: those that call it.
    """

    def __init__(self) -> None:
        import service_simulation.simulation  # noqa: F401

        self._of: dict[tuple[str, str], list[FunctionType]] = {}
        self.seeds: dict[tuple[str, str], list[int]] = {}
        self.parts: dict[tuple[str, str], set[str]] = {}
        self._costs: dict[int, float] = {}
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(SOURCE)):
                self._of.setdefault((each.__code__.co_filename, each.__code__.co_qualname), []).append(each)

    def replace(self, mutant: Mutant, text: str) -> bool:
        """Replace the code of the function that differs; returns False where that cannot be done."""
        file = str(SOURCE / mutant.path)
        functions = self._of.get((file, mutant.function), [])
        code = _find(compile(text, file, "exec"), mutant.function)
        if code is None or len(functions) != 1 or functions[0].__code__.co_freevars != code.co_freevars:
            return False
        functions[0].__code__ = code
        return True

    def record(self, seeds: Sequence[int]) -> None:
        """Note which functions the simulations of some seeds call."""
        from service_simulation.parts.driving import all_parts, drive
        from service_simulation.simulation import simulate

        for seed in seeds:
            begin = time.process_time()
            for called in _called(lambda seed=seed: simulate(seed)):
                self.seeds.setdefault(called, []).append(seed)
            self._costs[seed] = time.process_time() - begin
        for part in all_parts():
            last = 0
            for seed in range(40):
                for called in _called(lambda part=part, seed=seed: drive(part, seed)):
                    known = self.parts.setdefault(called, set())
                    fresh = part.__name__ not in known
                    known.add(part.__name__)
                    last = seed if fresh else last
                if seed > last + 5:  # the last seeds called nothing new
                    break

    def callers(self, mutant: Mutant) -> list[int]:
        """Return the seeds that call the function of a mutant, those that take the least time first."""
        return sorted(self.seeds.get((str(SOURCE / mutant.path), mutant.function), []), key=self._costs.__getitem__)


def _called(work: Any) -> set[tuple[str, str]]:
    """Return the functions of the store and the runtime that something calls, by file and qualified name."""
    wanted = tuple(str(SOURCE / "twinkle_server" / package) for package in PACKAGES)
    codes: set[CodeType] = set()

    def trace(frame: Any, _event: str, _argument: Any) -> None:
        codes.add(frame.f_code)

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return {
        (code.co_filename, code.co_qualname.partition(".<locals>")[0])
        for code in codes
        if code.co_filename.startswith(wanted)
    }


def _find(code: CodeType, name: str) -> CodeType | None:
    found = [each for each in code.co_consts if isinstance(each, CodeType)]
    exact = [each for each in found if each.co_qualname == name]
    if len(exact) == 1:
        return exact[0]
    inner = [each for each in found if name.startswith(f"{each.co_qualname}.")]
    return _find(inner[0], name) if len(inner) == 1 else None


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


def _limit(seconds: float) -> None:
    """End this process by a signal after so many seconds of CPU time, or if it hangs."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)


def hunt(mutant: Mutant, functions: Functions, seeds: Sequence[int], of_parts: int, seconds: float) -> str:
    """Return how the simulation found a mutant; "" if it did not.

    Args:
        mutant: to be found.
        functions: in memory.
        seeds: of simulations.
        of_parts: seeds of which the parts are driven first, where they call the function.
        seconds: of CPU time for all of them.
    """
    text = mutant.text()
    relevant = functions.parts.get((str(SOURCE / mutant.path), mutant.function), set())
    if not relevant:  # a rare case may call it
        from service_simulation.parts import driving

        relevant = {each.__name__ for each in (driving.OF_STORE if "/store/" in mutant.path else driving.OF_RUNTIME)}

    def work() -> str:
        try:
            if not functions.replace(mutant, text):
                for name in [name for name in sys.modules if name.partition(".")[0] in AGAIN]:
                    del sys.modules[name]
                sys.meta_path.insert(0, Importer(mutant.path, text))
            from service_simulation import world
            from service_simulation.parts import driving
            from service_simulation.simulation import simulate
        except Exception as error:
            return f"import: {error!r}"
        for seed in range(of_parts):
            for part in driving.parts_of(seed):
                if part.__name__ in relevant or not mutant.function:
                    _limit(PART_SECONDS)
                    try:
                        driving.drive(part, seed)
                    except BaseException as error:
                        return f"seed {seed}, {part.__name__}: {type(error).__name__}: {str(error)[:200]}"
        world.forget_template()
        for seed in seeds:
            _limit(SECONDS)
            try:
                simulate(seed)
            except BaseException as error:
                return f"seed {seed}: {type(error).__name__}: {str(error)[:200]}"
        return "survived"

    words, status = in_child(work, seconds)
    if words == "survived" or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return ""  # what takes as long as all seeds may be slow rather than wrong
    return words or f"the process ended with status {status}"


def check_unchanged(seeds: int, of_parts: int) -> None:
    """Demand that every seed passes without a mutant; one that fails anyway would find every mutant.

    Args:
        seeds: number of simulations.
        of_parts: number of seeds of which the parts are driven.
    """

    def work(first: int) -> str:
        from service_simulation.parts import driving
        from service_simulation.simulation import simulate

        for seed in range(first, first + _CHUNK):
            _limit(SECONDS)
            try:
                if seed < seeds:
                    simulate(seed)  # its parts included
                elif seed < of_parts:
                    for part in driving.parts_of(seed):
                        driving.drive(part, seed)
            except BaseException as error:
                return f"seed {seed}: {type(error).__name__}: {str(error)[:500]}"
        return "passed"

    for first in range(0, max(seeds, of_parts), _CHUNK):
        words, status = in_child(lambda first=first: work(first), _CHUNK * (SECONDS + PART_SECONDS))
        if words != "passed":
            raise SystemExit(f"without a mutant, a seed fails: {words or f'status {status}'}")


def check_table(every: Sequence[Mutant]) -> None:
    """Demand that each entry of the table excludes something that no rule excludes."""
    idle = [entry for entry in EQUIVALENT if not any(entry.matches(each) for each in every if not each.rule)]
    if idle:
        lines = "\n".join(f"{entry.function}: {entry.source!r} {entry.what!r}" for entry in idle)
        raise SystemExit(f"entries of EQUIVALENT that match no mutant:\n{lines}")


def main() -> int:
    """Run, and return the exit status: 1 if less than 95 % were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=150, help="mutants to draw; 0 is all")
    parser.add_argument("--draw", type=int, default=15, help="seed of the draw")
    parser.add_argument("--seeds", type=int, default=1000, help="simulations of each mutant")
    parser.add_argument("--parts", type=int, default=200, help="seeds of which only the parts are driven, at first")
    parser.add_argument("--lines", type=int, default=40, help="simulations of which the called functions are recorded")
    parser.add_argument("--only", default="", help="mutants whose name or function contains one of these (A,B)")
    parser.add_argument("--list", action="store_true", help="list mutants and run none")
    parser.add_argument("--seconds", type=float, default=3600.0, help="CPU time of the simulations of one mutant")
    options = parser.parse_args()
    every = mutants()
    check_table(every)
    names = options.only.split(",")
    drawn = [each for each in every if any(name in f"{each.name} {each.function}" for name in names)]
    if options.sample and options.sample < len(drawn):
        drawn = random.Random(options.draw).sample(drawn, options.sample)
    reasons = Counter("rule" if each.rule else "table" if each.reason else "" for each in drawn)
    chosen = [each for each in drawn if not each.reason]  # in the order of the draw: the first ones are a sample, too
    print(
        f"{len(every)} mutants; {len(drawn)} drawn, of which rules exclude {reasons['rule']} and the table "
        f"{reasons['table']}; {len(chosen)} run",
        flush=True,
    )
    if options.list:
        for each in sorted(drawn, key=lambda each: each.name):
            print(f"{each.name} [{each.function}] {each.source!r} {each.reason and '= ' + each.reason}")
        return 0
    check_unchanged(options.seeds, options.parts)
    functions = Functions()
    functions.record(range(options.lines))
    survivors: list[str] = []
    begin, used = time.monotonic(), time.process_time()
    for number, mutant in enumerate(chosen, 1):
        first = functions.callers(mutant)
        rest = [seed for seed in range(options.seeds) if seed not in set(first)]
        found = hunt(mutant, functions, [*first, *rest][: options.seeds], options.parts, options.seconds)
        if not found:
            survivors.append(f"{mutant.name} [{mutant.function}] {mutant.source!r}")
        never = "" if first or not mutant.function else " (no simulation calls it)"
        print(f"{number:4} {'found' if found else 'SURVIVED' + never:9} {mutant.name}  {found[:160]!r}", flush=True)
    share = 1 - len(survivors) / len(chosen)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} found: {share:.1%}, in {time.monotonic() - begin:.0f} s, "
        f"{cpu.ru_utime + cpu.ru_stime + time.process_time() - used:.0f} s of CPU time"
    )
    print("\n".join(["not found:", *survivors]))
    return share < 0.95


if __name__ == "__main__":
    sys.exit(main())

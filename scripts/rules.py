"""Checks the rules of this repository that no linter knows; `make lint` runs it.

    python scripts/rules.py            # all rules; prints each violation, exit code 1 if there is one
    python scripts/rules.py --list     # the rules, a line each

Each rule is a function that yields violations. Its first line says what must hold.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from sys import stdlib_module_names
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from dangers import dangers  # noqa: E402
from house import MEMBERS, Member, imported, members_below, providers_of_packages  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

Rule = Callable[[], Iterator[str]]
RULES: list[Rule] = []

TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".jsonl", ""}
GENERATED = {"__pycache__", ".venv", "site", "runs", "dist", "build"}
FOLDERS = (
    "tests",
    "scripts",
    "examples",
    "benchmarks",
    "docs",
    ".ci",
    *(str(m.folder.relative_to(ROOT)) for m in MEMBERS),
)
SCRIPTS = ("benchmarks", "scripts", "examples")
ELSEWHERE = {"_kit_worker.py", "_kit_pool_worker.py"}  # run with another library that is called twinkle as well
MACHINE = re.compile(r"/(?:" + "|".join(("work", "root", "home")) + r")/\w|[A-Z]:\\\\?Users")
DANGEROUS = {
    "plugins/cli/src/twinkle_cli/configuration.py": ["yaml.load"],  # with a safe loader of its own
    "plugins/kernels/src/twinkle_kernels/loading.py": ["trust_remote_code=True"],  # kernels that were verified before
    "plugins/testing/src/twinkle_testing/contracts/common.py": ["import pickle"],  # a component's own data, both ways
    "plugins/testing/src/twinkle_testing/contracts/optimizer.py": ["torch.load"],  # what the check has just saved
    "plugins/testing/src/twinkle_testing/contracts/scheduler.py": ["torch.load", "weights_only=False"],
    "plugins/rewards/src/twinkle_rewards/worker.py": ["import pickle"],  # a call to its own process and back
    "plugins/transformers/src/twinkle_transformers/loading.py": [
        "trust_remote_code=trust_remote_code"
    ],  # user's choice
}
"""What each file may do with data; the server has no entry, since strangers send it theirs."""
REQUIRED_BY_SOME = {"local": {"torch"}}  # several processes need torch, one does not
PLUGINS = {member.name: member for member in MEMBERS if member.name not in ("twinkle-registry", "twinkle-torch")}


def rule(function: Rule) -> Rule:
    """Add a function to the rules."""
    RULES.append(function)
    return function


@rule
def no_path_of_one_machine() -> Iterator[str]:
    """No file names a path that exists on one machine only."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted({*ROOT.iterdir(), *below}):
        if (
            path.is_file()
            and path.suffix in TEXTS
            and path.name != ".git"
            and not GENERATED & {*path.relative_to(ROOT).parts}
        ):
            for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
                if MACHINE.search(line):
                    yield f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"


@rule
def no_data_becomes_code() -> Iterator[str]:
    """No shipped module unpickles, evaluates or extracts data, beyond what `DANGEROUS` names."""
    found = {}
    for path in (path for member in MEMBERS for path in sorted(member.source.rglob("*.py"))):
        if each := dangers(path.read_text("utf-8")):
            found[str(path.relative_to(ROOT))] = [danger.partition(": ")[2] for danger in each]
    for path in sorted(found.keys() | DANGEROUS.keys()):
        if found.get(path) != DANGEROUS.get(path):
            yield f"{path}: contains {found.get(path)}, DANGEROUS names {DANGEROUS.get(path)}"


@rule
def members_have_the_same_shape() -> Iterator[str]:
    """Every distribution has a README with its name, `py.typed`, tests, and a folder of its name."""
    folders = {"twinkle-core": "twinkle_core", "twinkle-scaffolds": "templates"}
    for member in MEMBERS:
        folder = member.folder
        expected = folders.get(member.name, member.name.removeprefix("twinkle-"))
        for good, what in (
            (
                (folder / "README.md").read_text("utf-8").startswith(f"# {member.name}\n"),
                "README.md starts with its name",
            ),
            ((member.source / "py.typed").is_file(), "py.typed is there"),
            (list((folder / "tests").glob("test_*.py")), "tests are there"),
            (folder.name == expected, f"the folder is called {expected}"),
            (not list((folder / "tests").rglob("__init__.py")), "tests are no package"),
        ):
            if not good:
                yield f"{member.name}: must hold: {what}"


@rule
def plugins_are_found() -> Iterator[str]:
    """Every plugin of this repository is installed and its manifest is valid."""
    import twinkle

    records = {record.name: record for record in twinkle.registry().records}
    for name in PLUGINS:
        record = records.get(name)
        if record is None or record.status != "ok":
            yield f"{name}: {record.reason if record else 'is not installed'}"


@rule
def references_resolve() -> Iterator[str]:
    """Every component is found by its name, honours its contract and has a docstring; every config forbids extras."""
    import twinkle
    from twinkle_registry import TwinkleError

    registry = twinkle.registry()
    for spec in _specs():
        # A library that a component requires may be absent; its module is imported without it.
        try:
            if registry.find(f"{spec.dist}/{spec.name}", spec.kind) != spec:
                yield f"{spec.dist}/{spec.name}: its name finds another component"
            if not registry.resolve(replace(spec, requires=()), spec.kind).__doc__:
                yield f"{spec.ref}: has no docstring"
            if spec.config and registry.load(replace(spec, ref=spec.config)).model_config["extra"] != "forbid":
                yield f"{spec.config}: must refuse fields that it does not know"
        except TwinkleError as error:
            yield f"{spec.dist}/{spec.name}: {error}"


@rule
def summaries_are_one_line() -> Iterator[str]:
    """Every component has a summary of at most 90 characters without a full stop."""
    for spec in _specs():
        if not spec.summary or len(spec.summary) > 90 or spec.summary.endswith("."):
            yield f"{spec.dist}/{spec.name}: {spec.summary!r}"


@rule
def later_imports_are_required() -> Iterator[str]:
    """What a component's module imports anywhere is a requirement of the component or its distribution."""
    providers = providers_of_packages()
    own = {member.source.name for member in MEMBERS}
    for spec in own_specs():
        module = find_spec(spec.ref.partition(":")[0])
        tree = ast.parse(Path(str(module and module.origin)).read_text("utf-8"))
        names = {canonicalize_name(Requirement(text).name) for text in requirements(spec)}
        names |= REQUIRED_BY_SOME.get(spec.name, set())
        for top in sorted({name for _, name in imported(tree)} - {*stdlib_module_names} - own):
            if not names & {*map(canonicalize_name, providers.get(top, [top]))}:
                yield f"{spec.dist}/{spec.name}: its module imports {top!r}, which `requires` does not name"


@rule
def requirements_are_offered() -> Iterator[str]:
    """What a component requires is a dependency or an extra of its distribution or of core."""
    core = PLUGINS["twinkle-core"]
    for member in PLUGINS.values():
        manifest = tomllib.loads((member.source / "twinkle-plugin.toml").read_text("utf-8"))
        wanted = {text for component in manifest.get("component", ()) for text in component.get("requires", ())}
        offered = {canonicalize_name(Requirement(text).name) for m in (member, core) for text in m.requirements}
        for text in sorted(wanted):
            if canonicalize_name(Requirement(text).name) not in offered:
                yield f"{member.name}: a component requires {text!r}, which its pyproject.toml does not offer"


@rule
def kinds_are_whole() -> Iterator[str]:
    """Every kind has a package that lists its components, a hook spec, and a contract with a docstring."""
    import twinkle
    from twinkle import hookspecs
    from twinkle.kinds import KINDS

    hooks = {name: value for name, value in vars(hookspecs).items() if name.startswith("twinkle_")}
    components = {name for name, value in hooks.items() if "ComponentSpec" in str(inspect.signature(value))}
    for name in sorted(components ^ {f"twinkle_{kind}" for kind in KINDS}):
        yield f"{name}: kinds and hook specs differ"
    for name, kind in KINDS.items():
        package = importlib.import_module(f"twinkle.{name}")
        missing = {*twinkle.registry().names(name)} - {"local", "builtin"} - {*dir(package)}
        if not package.__doc__ or missing:
            yield f"twinkle.{name}: must have a docstring and list {sorted(missing)}"
        if f"kind `{name}`" not in (inspect.getdoc(hooks.get(f"twinkle_{name}")) or ""):
            yield f"twinkle_{name}: its docstring must name the kind"
        module, _, attribute = kind.contract.partition(":")
        if module and (module != f"twinkle.{name}" or not inspect.getdoc(getattr(package, attribute, None))):
            yield f"{kind.contract}: must be in twinkle.{name} and have a docstring"


@rule
def contract_checks_are_explained() -> Iterator[str]:
    """Every kind has at least five checks with names of their own and a sentence each; examples' keys are explained."""
    from twinkle.kinds import KINDS
    from twinkle_testing import checks_for
    from twinkle_testing.contracts.case import example_keys
    from twinkle_testing.contracts.running import about

    for kind in KINDS:
        checks = checks_for(kind)
        if len({check.name for check in checks}) != len(checks) or len(checks) < 5:
            yield f"{kind}: must have at least five checks, each with a name of its own"
        for check in checks:
            if not check.statement.endswith(".") or len(check.statement) >= 140:
                yield f"{kind}: {check.name}: its statement must be one sentence of less than 140 characters"
        case = importlib.import_module(f"twinkle_testing.contracts.{kind}").CASE
        if case.kind != kind or {*about(kind), "kwargs", "skip"} != {*example_keys(case)}:
            yield f"{kind}: the example's keys and their explanations differ"


@rule
def scripts_import_what_exists() -> Iterator[str]:
    """Every name that a benchmark, a script or an example imports from our packages is there."""
    own = {member.source.name for member in MEMBERS}
    for path in sorted(path for folder in SCRIPTS for path in (ROOT / folder).rglob("*.py")):
        if path.name in ELSEWHERE:
            continue
        nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            if (node.module or "").partition(".")[0] in own and not node.level:
                for name in node.names:
                    if not _is_importable(str(node.module), name.name):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {name.name}"


def _is_importable(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ImportError:
        return False


@rule
def generated_files_are_current() -> Iterator[str]:
    """The index of our own components and the type stubs are what their scripts write."""
    for script in ("own_index.py", "type_stubs.py"):
        command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or done.stdout:
            yield (done.stdout + done.stderr).strip() or f"{script} --check failed"


@cache
def _specs() -> list[Any]:
    import twinkle

    records = (record for record in twinkle.registry().records if record.name in PLUGINS and record.manifest)
    return [spec for record in records for spec in record.manifest.components if record.manifest]


def own_specs() -> list[Any]:
    """Return the components whose module is in this repository."""
    own = {member.source.name for member in MEMBERS}
    return [spec for spec in _specs() if spec.ref.partition(".")[0] in own]


def requirements(spec: Any) -> list[str]:
    """Return what is installed where `spec` can be used: dependencies of its distribution and its own requirements."""
    return [*(text for member in members_of(spec) for text in member.project["dependencies"]), *spec.requires]


def members_of(spec: Any) -> list[Member]:
    """Return the member that offers `spec` and those that it depends on."""
    (own,) = (member for member in MEMBERS if member.name == spec.dist)
    return [own, *members_below(own)]


def main() -> int:
    """Run all rules and print what violates them."""
    count = 0
    for function in RULES:
        statement = (function.__doc__ or "").splitlines()[0]
        if "--list" in sys.argv[1:]:
            print(statement)
            continue
        began = time.perf_counter()
        violations = list(function())
        count += len(violations)
        print(f"{'FAIL' if violations else 'ok':5}{time.perf_counter() - began:6.1f} s  {statement}")
        print("".join(f"      {violation}\n" for violation in violations), end="")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

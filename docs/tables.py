"""Generates the parts of the documentation that come from the code: tables of kinds, hooks, options, commands, errors.

    python docs/tables.py

writes them between `<!-- generated: NAME -->` and `<!-- end -->` and draws the loss curves. Tests compare both with the
code.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
CONFORMANCE = DOCS.parent / "tests" / "conformance"
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OUR_PLUGINS = (
    "twinkle-core", "twinkle-data", "twinkle-chat", "twinkle-transformers", "twinkle-losses", "twinkle-metrics",
    "twinkle-trackers", "twinkle-recipes", "twinkle-patches", "twinkle-kernels", "twinkle-notifiers",
    "twinkle-rewards", "twinkle-agentic", "twinkle-hub", "twinkle-cli", "twinkle-testing", "twinkle-scaffolds",
)  # fmt: skip
BY_KIND = ("twinkle-core", "twinkle-data", "twinkle-chat")
"""Plugins whose components are documented on the page of their kind."""
CORE_PAGES = {
    "reference data": ("dataset", "dataloader", "preprocessor", "filter", "template", "tool_parser", "processor",
                       "loss_scale", "data_format"),
    "reference training": ("model", "engine", "loss", "metric", "optimizer", "scheduler", "patch", "kernel",
                           "checkpoint_engine"),
    "reference sampling": ("sampler", "reward", "advantage", "rollout", "tool", "env"),
    "reference running": ("runtime", "mesh", "platform", "run", "recipe", "tracker", "notifier", "hub", "kinds",
                          "paths", "logging", "cli", "requirements", "plugin", "testing", "errors"),
}  # fmt: skip


def renewed(text: str) -> str:
    """Return a page with all its generated parts as they should be."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{GENERATED[found['name']]()}\n\n{found[3]}", text)


def kinds() -> str:
    """Every kind of component, with its contract."""
    from twinkle.kinds import KINDS

    rows = [
        (f"`{name}`", f"`{kind.contract.replace(':', '.')}`" if kind.contract else "torch's protocol", kind.summary)
        for name, kind in KINDS.items()
    ]
    return _table(("kind", "contract", "what it does"), rows)


def scaffolds() -> str:
    """What each scaffold of `twinkle plugins new` holds."""
    from twinkle_scaffolds import baking

    facts = {name: baking.SCAFFOLD / "kinds" / name / "facts.yml" for name in baking.scaffolds()}
    summary = re.compile(r"^summary: (.*)$", re.MULTILINE)
    rows = [(f"`{name}`", summary.findall(path.read_text("utf-8"))[0]) for name, path in facts.items()]
    return _table(("kind", "its component"), rows)


def hooks() -> str:
    """Every lifecycle hook, with its arguments."""
    from twinkle import hookspecs
    from twinkle.kinds import KINDS

    specs = [value for name, value in vars(hookspecs).items() if name.startswith("twinkle_")]
    lifecycle = [spec for spec in specs if spec.__name__.removeprefix("twinkle_") not in KINDS]
    rows = [(f"`{spec.__name__}({_arguments(spec)})`", " ".join((spec.__doc__ or "").split())) for spec in lifecycle]
    return _table(("hook", "when"), rows)


def hook_specs() -> str:
    """Every hook spec, with its signature as it is written."""
    from twinkle import hookspecs
    from twinkle.kinds import KINDS

    parts: dict[bool, list[str]] = {True: [], False: []}
    for node in ast.parse(inspect.getsource(hookspecs)).body:
        if isinstance(node, ast.FunctionDef):
            says = " ".join((ast.get_docstring(node) or "").split())
            signature = f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
            is_lifecycle = node.name.removeprefix("twinkle_") not in KINDS
            parts[is_lifecycle].append(f"### `{node.name}`\n\n```text\n{signature}\n```\n\n{says}")
    return "\n\n".join(["## Lifecycle hooks", *parts[True], "## Component hooks", *parts[False]])


def contracts() -> str:
    """Every check of the contract kit, and what an example of each kind may say."""
    from twinkle.kinds import KINDS
    from twinkle_testing.contracts.running import about, checks_for

    common = "\n".join(f"- `{c.name}`: {c.statement}" for c in checks_for("loss")[:2])
    parts = [f"### Of every kind\n\n{common}"]
    for kind in KINDS:
        keys = "\n".join(f"- `{key}`: {says}" for key, says in about(kind).items())
        rows = [(f"`{c.name}`", c.statement) for c in checks_for(kind)[2:]]
        example = f"Keys of an example:\n\n{keys}\n\n" if keys else ""
        parts.append(f"### `{kind}`\n\n{example}{_table(('check', 'statement'), rows)}")
    return "\n\n".join(parts)


def options() -> str:
    """Every option of the recipe sft."""
    from twinkle_recipes.config import SFTConfig

    return _options_table(SFTConfig)


def options_of_grpo() -> str:
    """Every option of the recipe grpo that sft has not, or with another default or meaning."""
    from twinkle_recipes.config import SFTConfig
    from twinkle_recipes.policy.config import GRPOConfig

    return _options_table(GRPOConfig, beside=SFTConfig)


def options_of_dpo() -> str:
    """Every option of the recipe dpo that sft has not, or with another default or meaning."""
    from twinkle_recipes.config import SFTConfig
    from twinkle_recipes.preference.config import DPOConfig

    return _options_table(DPOConfig, beside=SFTConfig)


def options_of_gkd() -> str:
    """Every option of the recipe gkd that sft has not, or with another default or meaning."""
    from twinkle_recipes.config import SFTConfig
    from twinkle_recipes.distillation.config import DistillationConfig

    return _options_table(DistillationConfig, beside=SFTConfig)


def options_of_embedding() -> str:
    """Every option of the recipe embedding that sft has not, or with another default or meaning."""
    from twinkle_recipes.config import SFTConfig
    from twinkle_recipes.similarity import EmbeddingConfig

    return _options_table(EmbeddingConfig, beside=SFTConfig)


def _options_table(model: Any, beside: Any = None) -> str:
    from twinkle_cli.configuration import options_of

    others = [option for option in options_of(beside) if not option.group] if beside is not None else []
    known = {option.name: (option.description, option.default) for option in others}
    found = [option for option in options_of(model) if option.group or _is_new(option, known)]
    used = {option.path[0] for option in found if not option.group}
    rows = []
    for option in found:
        if option.group and option.path[0] not in used:
            continue
        if option.group:
            rows.append((f"**`{option.name}`**", "", "", f"**{option.description}**"))
        else:
            default = "" if option.required else f"`{_shown(option.default)}`"
            rows.append((f"`{option.name}`", f"`{option.type_text}`".replace("|", "\\|"), default, option.description))
    table = _table(("key", "type", "default", "meaning"), rows)
    missing = sorted(known.keys() - {option.name for option in options_of(model)})
    absent = f"Options of `sft` that this recipe does not have: {', '.join(f'`{name}`' for name in missing)}.\n\n"
    return absent + table if missing else table


def _is_new(option: Any, known: dict[str, Any]) -> bool:
    return known.get(option.name) != (option.description, option.default)


def script_arguments() -> str:
    """Every argument of `CLI.from_args`, group by group."""
    from twinkle_cli.arguments.help import default_text
    from twinkle_cli.arguments.names import GROUPS, arguments

    rows: dict[str, list[tuple[str, ...]]] = {group: [] for group in GROUPS}
    for option, field in arguments():
        names = [option.path[1], *filter(None, [field.metadata["alias"]])]
        text = option.type_text.replace("|", "\\|")
        shown = ", ".join(f"`{name}`" for name in names)
        rows[option.path[0]].append((shown, f"`{text}`", f"`{default_text(option.default)}`", option.description))
    head = ("argument", "type", "default", "meaning")
    return "\n\n".join(f"### `{name}`\n\n{GROUPS[name].__doc__}\n\n{_table(head, rows[name])}" for name in GROUPS)


def commands() -> str:
    """Every command of `twinkle` with its arguments and options."""
    import click

    from twinkle_cli.group import main

    command = main if isinstance(main, click.Command) else import_module("twinkle_cli.group").cli
    return "\n\n".join(_command_sections(command, "twinkle", None))


def _command_sections(command: Any, name: str, parent: Any) -> list[str]:
    import click

    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    if isinstance(command, click.Group):
        names = [name for name in command.list_commands(context) if name not in ("-h", "--help")]
        children = [(f"{name} {child}", command.get_command(context, child)) for child in names]
        return [section for path, child in children for section in _command_sections(child, path, context)]
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    usage = " ".join([name, *(argument.make_metavar(context) for argument in arguments), "[OPTIONS]"])
    rows = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    table = [(f"`{flag}`".replace("|", "\\|"), text.replace("|", "\\|")) for flag, text in filter(None, rows)]
    summary = inspect.cleandoc(command.help or "").partition("\f")[0].strip()
    parts = [f"## `{name}`", f"```text\n{usage}\n```", summary, _table(("option", "meaning"), table) if table else ""]
    return ["\n\n".join(filter(None, parts))]


def server_settings() -> str:
    """Every setting of the service by section of its file, with its flag and its field in Python."""
    from twinkle_cli.configuration import type_text
    from twinkle_server.cli.serve import FLAGS
    from twinkle_server.configuration import entries

    flags = {flag.key: flag.names for flag in FLAGS}
    sections: dict[str, list[tuple[str, ...]]] = {}
    for entry in entries():
        *groups, key = entry.parts
        flag = f"`{flags[entry.key]}`" if entry.key in flags else ""
        kind = f"`{type_text(entry.annotation)}`".replace("|", "\\|").replace("Ellipsis", "...")
        default = "" if entry.default is MISSING else f"`{_shown(entry.default)}`"
        row = (f"`{key}`", kind, default, flag.replace("|", "\\|"), f"`{'.'.join(entry.path)}`", entry.meaning)
        sections.setdefault(".".join(groups), []).append(row)
    head = ("key", "type", "default", "flag", "field", "meaning")
    titles = {name: f"### `{name}`" if name else "### Top level" for name in sections}
    return "\n\n".join(f"{titles[name]}\n\n{_table(head, rows)}" for name, rows in sections.items())


def published_api() -> str:
    """The comparison of our signatures with the published ones."""
    page: str = _module("published").page()
    return page


def _module(name: str) -> Any:
    """Return a module of this folder, which is not on the path if a test runs this file."""
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def errors() -> str:
    """The tree of errors."""
    from twinkle import errors

    tree = (errors.__doc__ or "").partition("\n\n")[2].strip()
    return f"```text\n{tree}\n```"


def components() -> str:
    """Every component that comes with Twinkle; those that are torch's own in one line a kind."""
    rows, of_torch = [], {}
    for spec in _specs():
        if spec.ref.startswith("torch."):
            of_torch.setdefault((spec.kind, spec.dist), []).append(spec.name)
        else:
            rows.append((spec.kind, f"`{spec.name}`", spec.dist, spec.summary))
    for (kind, dist), names in of_torch.items():
        rows.append((kind, ", ".join(f"`{name}`" for name in names), dist, f"torch's own {kind}s"))
    return _table(("kind", "name", "plugin", "what it is"), sorted(rows, key=lambda row: (row[0], row[3])))


def conformance() -> str:
    """Every line of the checklist of the Tinker protocol, with the tests that show it."""
    shown = shown_by()
    parts = []
    for head, lines in checklist():
        rows = [
            (str(number), duty, says.replace("|", "\\|"), "<br>".join(shown[number])) for number, duty, says in lines
        ]
        parts.append(f"### {head}\n\n{_table(('line', '', 'what holds', 'shown by'), rows)}")
    return "\n\n".join(parts)


def checklist() -> list[tuple[str, list[tuple[int, str, str]]]]:
    """Return the checklist's sections, each with its lines: number, M or S, text."""
    text = (CONFORMANCE / "checklist.md").read_text("utf-8")
    line = re.compile(r"^(\d+)\. \*\*([MS])\*\* (.*)$", re.MULTILINE)
    sections = (part.partition("\n") for part in text.split("\n## ")[1:])
    return [(head, [(int(at), duty, says) for at, duty, says in line.findall(body)]) for head, _, body in sections]


def shown_by() -> dict[int, list[str]]:
    """Return the tests of each line of the checklist; a test's name says which lines it shows."""
    found: dict[int, list[str]] = {}
    for path in sorted(CONFORMANCE.glob("test_*.py")):
        functions = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
        counting = _counting(functions)
        for node in functions:
            if numbers := re.match(r"test_lines?_((?:\d+_)+)", node.name):
                marks = ["*soak*"] if "pytest.mark.soak" in map(ast.unparse, node.decorator_list) else []
                marks += ["*counting*"] if node.name in counting else []
                shown = ", ".join([f"`{path.name}::{node.name}`", *marks])
                for number in numbers[1].split("_")[:-1]:
                    found.setdefault(int(number), []).append(shown)
    return found


def _counting(functions: list[ast.FunctionDef]) -> set[str]:
    """Return which of a file's fixtures, helpers and tests use the engine that counts instead of training."""
    uses = {
        function.name: {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        | {argument.arg for argument in function.args.args}
        for function in functions
    }
    found = {"ledger", "counting", "counted"}
    while more := {name for name, used in uses.items() if used & found} - found:
        found |= more
    return found


LIMITS = {
    "size of a request body, as sent / decompressed": "{body_bytes} / {decompressed_bytes}; larger: 413",
    "size of all request bodies in memory": "{inflight_bytes}; more: 429",
    "rows of one forward-backward request / their tokens": "{datums} / {request_tokens}",
    "tokens of a row": "the context length of the model",
    "sequences of one sampling request": "{samples}",
    "pending operations of one tenant": "{queued}; more: 429",
    "models of one tenant, for keys without a quota of their own": "{adapters}; more: 403",
    "wait of one request for a result": "{poll}, then the client must ask again; an unknown id is answered at once",
    "retention of a result, unread / read": "{kept_result} / {read_result}",
    "retention of sequences sampled with `record_stability_info`": "{kept_record} after the last sampling or training",
    "recipients of an encrypted checkpoint": "{recipients}",
    "size of a payload or result in the database": "{small_bytes}; larger ones are files",
    "missing sequence number": (
        "reported as the reason for waiting after {gap_pause}; the waiting operations fail after {gap_fail}. While the "
        "missing request may still arrive (slow upload, restart, {resend} after a rejection), they fail after "
        "{gap_limit}"
    ),
    "time of a client's loss graph": "{graph_seconds} seconds for all rows of a request, backward included",
    "distance of a sequence number from the next expected one": "{farthest}; farther: 422",
    "rate of invalid operations of one tenant": "{refusals} a second, bursts of {refusals_at_once}; more: 429",
    "session without a heartbeat": "ends after {session}",
    "state of a model after its session ended": "kept for {kept_run}",
    "audit log entries": "kept for {kept_audit}",
    "figures of a run": "kept for {kept_figures} after its last optimizer step; {points} points",
    "recorded rollouts": (
        "{rollout_rows} per run, {rollout_tokens} tokens each, {rollout_bytes} together; kept for {kept_rollouts}"
    ),
    "login to the dashboard": "ends after {login}",
    "time between snapshots of a changed model": "{snapshot}, or {snapshot_steps} optimizer steps",
    "engine without a sign of life": (
        "reported as not responding after {silent}; restarted after {stopped} if its process is stopped (SIGSTOP) and "
        "operations are pending"
    ),
    "plugin that is revoked while the service runs": "disabled within {revocations}",
    "time of one pass": "{deadline}, then the engine restarts",
    "loss of a plugin, per operation": "{loss}, {loss_bytes} of memory",
    "import of a loss plugin": "{loss_start}",
    "SIGTERM": "waits up to {drain} for running work",
    "time to load the base model": "{start}",
    "expired checkpoints, and checkpoints over a quota": "moved to the trash within {upkeep}",
    "checkpoint in the trash": "kept for {trash}; the trash of a tenant is never larger than its quota of bytes",
}


def limits() -> str:
    """Every limit of the service, with its default."""
    from twinkle_server.engine.encryption import MAX_RECIPIENTS
    from twinkle_server.runtime.queues import MAX_GAP
    from twinkle_server.settings import Limits, Rollouts, Settings, Times
    from twinkle_server.store.figures import MOST
    from twinkle_server.tenancy import quotas

    amounts = {name: value for name, value in asdict(Limits()).items() if value is not None}
    values = dict.fromkeys(asdict(Limits()), "no limit")
    values |= {name: _size(value) if name.endswith("_bytes") else f"{value:,}" for name, value in amounts.items()}
    values |= {name: _duration(value) for name, value in asdict(Times()).items()}
    values |= {"farthest": f"{MAX_GAP:,}", "snapshot_steps": str(Settings("", DOCS).snapshot_steps)}
    values |= {"recipients": str(MAX_RECIPIENTS), "points": f"{MOST:,}"}
    values |= {"rollout_rows": str(Rollouts().rows), "rollout_tokens": f"{Rollouts().tokens:,}"}
    values |= {"rollout_bytes": _size(Rollouts().bytes)}
    values |= {"refusals": f"{quotas._REFUSALS:g}", "refusals_at_once": f"{quotas._REFUSALS_AT_ONCE:,.0f}"}
    return _table(("what", "limit"), [(what, says.format_map(values)) for what, says in LIMITS.items()])


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


def _duration(seconds: float) -> str:
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    return next(f"{seconds / size:g} {unit}" for unit, size in units if seconds >= 2 * size)


def top() -> str:
    """What `twinkle` itself offers, and where each is documented."""
    import twinkle

    rows = []
    for name in sorted(twinkle._WHERE):
        value = getattr(twinkle, name)
        page = next((page for page, rooms in CORE_PAGES.items() if _room_of(value.__module__) in rooms), None)
        link = f"[`twinkle.{name}`]({page.split()[1]}.md#{_place(value)})" if page else f"`twinkle.{name}`"
        rows.append((link, (value.__doc__ or "").strip().partition("\n")[0]))
    return _table(("name", "what it is"), rows)


def reference(page: str) -> Callable[[], str]:
    """Return a function that lists the names of some rooms of core, each documented from its docstring."""

    def generate() -> str:
        listed = ((room, _places(room)) for room in CORE_PAGES[page])
        parts = ([f"## `twinkle.{room}`", *(f"::: {p}" for p in places)] for room, places in listed if places)
        return "\n\n".join(line for part in parts for line in part)

    return generate


def reference_plugins() -> str:
    """The components of our plugins, each documented from its docstring."""
    places: dict[str, list[str]] = {}
    for spec in _specs():
        if spec.dist not in BY_KIND and not spec.ref.startswith("torch."):
            places.setdefault(spec.dist, []).append(spec.ref.replace(":", "."))
    return "\n\n".join("\n\n".join([f"## {dist}", *(f"::: {p}" for p in sorted(places[dist]))]) for dist in places)


SERVER_MODULES = ("settings", "application", "operations", "ports", "errors")
TORCH_MODULES = ("head", "segments", "collate", "numerics", "pooling")


def reference_modules(package: str, names: Iterable[str]) -> Callable[[], str]:
    """Return a function that lists the public classes and functions of some modules of a package."""

    def generate() -> str:
        parts = []
        for name in names:
            module = import_module(f"{package}.{name}")
            public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
            values = [value for name in public if _is_definition(value := getattr(module, name))]
            places = [_place(value) for value in values if value.__module__ == module.__name__]
            parts += [f"## `{module.__name__}`", *(f"::: {place}" for place in places)]
        return "\n\n".join(parts)

    return generate


def reference_registry() -> str:
    """The public names of the registry; its errors are those of `twinkle.errors`."""
    import twinkle_registry

    values = [getattr(twinkle_registry, name) for name in twinkle_registry.__all__]
    documented = [value for value in values if _is_definition(value) and not value.__module__.endswith(".errors")]
    return "\n\n".join(f"::: {place}" for place in sorted(map(_place, documented)))


def _places(room: str) -> list[str]:
    """Return where the public names of a module of core are defined, with what plugins export to it."""
    from twinkle import registry

    module = import_module(f"twinkle.{room}")
    public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    values = [value for name in getattr(public, "own", public) if _is_definition(value := getattr(module, name))]
    places = {_place(value) for value in values if room == "errors" or _room_of(value.__module__) == room}
    exports = (export for specs in registry().exports(f"twinkle.{room}").values() for export in specs)
    places |= {_place(value) for e in exports if _is_definition(value := getattr(module, e.name))}
    return sorted(
        places | {spec.ref.replace(":", ".") for spec in _specs() if (spec.kind, spec.dist in BY_KIND) == (room, True)}
    )


def _is_definition(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _place(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _room_of(module: str) -> str:
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "twinkle" else ""


def _specs() -> list[Any]:
    from twinkle import registry

    records = {record.name: record for record in registry().records}
    return [spec for name in OUR_PLUGINS for spec in records[name].manifest.components]


def _arguments(function: Any) -> str:
    return ", ".join(inspect.signature(function).parameters)


def _shown(value: Any) -> str:
    import json

    return json.dumps(value, default=lambda other: other.model_dump() if hasattr(other, "model_dump") else str(other))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


GENERATED: dict[str, Callable[[], str]] = {
    "kinds": kinds,
    "scaffolds": scaffolds,
    "hooks": hooks,
    "hook specs": hook_specs,
    "contracts": contracts,
    "options": options,
    "options of grpo": options_of_grpo,
    "options of dpo": options_of_dpo,
    "options of gkd": options_of_gkd,
    "options of embedding": options_of_embedding,
    "script arguments": script_arguments,
    "errors": errors,
    "published api": published_api,
    "components": components,
    "reference plugins": reference_plugins,
    "reference registry": reference_registry,
    "top": top,
    "tinker conformance": conformance,
    "service limits": limits,
    "server settings": server_settings,
    "commands": commands,
    "reference server": reference_modules("twinkle_server", SERVER_MODULES),
    "reference torch": reference_modules("twinkle_torch", TORCH_MODULES),
    **{page: reference(page) for page in CORE_PAGES},
}


def draw_loss(path: Path) -> None:
    """Draw the loss curve of the kept run with the recipe's own code."""
    from twinkle_recipes.history import History, write_loss_curve

    write_loss_curve(History.read(DOCS / "assets" / "metrics.jsonl", last_step=10**9), path, "quickstart")


def draw_demo(path: Path) -> None:
    """Draw the rewards of the kept runs of `make grpo-demo`, one a seed, with the recipe's own code."""
    from twinkle_recipes.history import Curve, History, write_curve

    runs = sorted((DOCS / "assets").glob("grpo-demo-seed*.jsonl"))
    names = [run.stem.removeprefix("grpo-demo-").replace("seed", "seed ") for run in runs]
    merged = History()
    for run, name in zip(runs, names, strict=True):
        for step, numbers in History.read(run, last_step=10**9).steps:
            merged.add(step, {f"{key}, {name}": numbers[key] for key in ("reward", "eval/reward") if key in numbers})
    lines = {f"reward, {name}": f"sampled, {name}" for name in names}
    points = {f"eval/reward, {name}": f"greedy, held out, {name}" for name in names}
    write_curve(merged, Curve(lines, "mean reward", points), path, "make grpo-demo")


def main() -> None:
    """Write all pages and the curves anew."""
    draw_loss(DOCS / "assets" / "loss.png")
    draw_demo(DOCS / "assets" / "grpo-demo.png")
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text("utf-8")
        if (now := renewed(text)) != text:
            path.write_text(now, "utf-8")


if __name__ == "__main__":
    main()

"""`twinkle run RECIPE`: options from the recipe's configuration model, validation, and the run itself.

With `--nproc`, the command starts itself in several processes. A first Ctrl-C during imports takes effect after them.
"""

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from twinkle.errors import ComponentNotFound, ConfigError, PluginBroken
from twinkle.platform import Platform
from twinkle_cli.group import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from pydantic import BaseModel

    from twinkle.mesh import DeviceMesh
    from twinkle_cli.configuration import Option


RESERVED = {"config": True, "runs": True, "name": True, "nproc": True, "debug": False, "help": False}
_RESERVED_HELP = (
    (
        "--config FILE",
        "YAML file with any of the options below; flags override it [default: that of the run to resume]",
    ),
    ("--runs DIR", "Parent of the run folder [default: runs]"),
    ("--name NAME", "Name of the run [default: the recipe's name]"),
    ("--nproc N", "Start N processes on this machine with torchrun [default: 1]"),
    ("--debug", "Show the traceback of an error"),
    ("--help", "Show this message and exit"),
)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
    options_metavar="RECIPE [--config FILE] [OPTIONS]",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_context
def run(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Run a recipe; `twinkle run RECIPE --help` shows its options."""
    if not args or args[0] in ("-h", "--help"):
        click.echo(_overview())
        ctx.exit(0 if args else 2)
    if args[0] == "--debug" and len(args) > 1:
        args = (*args[1:], "--debug")
    if args[0].startswith("-"):
        raise ConfigError(f"the first argument must be the name of a recipe, got {args[0]!r}; {_known_recipes()}")
    recipe, rest = args[0], ["--help" if arg == "-h" else arg for arg in args[1:]]
    with interrupt_afterwards():
        model = config_model(recipe)
        options = _options(model, recipe)
        if "--help" in rest:
            click.echo(_help(recipe, options))
            return
        prepared, nproc = _prepare(recipe, rest, model, options)
    processes = process_count(nproc)
    check_mesh(getattr(prepared[1], "device_mesh", None), max(processes, Platform.get_world_size()))
    if processes > 1:
        ctx.exit(start_ranks(processes, ["run", *args]))
    _run(*prepared)


def config_model(recipe: str) -> "type[BaseModel] | None":
    """Return the pydantic model of a recipe's configuration, or None if it has none.

    The manifest names the model; for a recipe by path (`./file.py:train`) it is the type of the first parameter.
    """
    from twinkle._registry import registry

    if ":" not in recipe:
        spec = registry().find(recipe, "recipe")
        if not spec.config:
            return None
        model = registry().load(dataclasses.replace(spec, ref=spec.config, requires=()))
        where = spec.config
    else:
        model = _first_parameter_type(registry().resolve(recipe, "recipe"))
        where = f"the type of its first parameter, {model!r}"
    from pydantic import BaseModel

    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginBroken(f"recipe {recipe!r}: its configuration must be a pydantic model, got {where}")
    return model


def _first_parameter_type(recipe: Any) -> Any:
    import inspect
    import typing

    function = recipe if inspect.isfunction(recipe) else recipe.__call__
    hints = typing.get_type_hints(function)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return hints.get(names[0]) if names else None


def _options(model: "type[BaseModel] | None", recipe: str) -> "dict[str, Option]":
    from twinkle_cli.configuration import options_of

    options = {option.name: option for option in options_of(model)} if model is not None else {}
    if conflicts := sorted(set(options) & set(RESERVED)):
        raise PluginBroken(
            f"recipe {recipe!r}: its configuration has the fields {', '.join(conflicts)}, "
            "which are flags of `twinkle run` itself; its author must rename them"
        )
    return options


def _prepare(
    recipe: str, args: list[str], model: "type[BaseModel] | None", options: "Mapping[str, Option]"
) -> tuple[tuple[Any, Any, str, str], str | None]:
    """Return the arguments of `_run` (recipe, configuration, name of the run, parent folder), and nproc."""
    from twinkle._registry import registry
    from twinkle_cli.configuration import merge, parse_flags, read_config, validate

    flags = parse_flags(args, options, RESERVED)
    file = flags.reserved.get("config") or _config_of(flags.values.get("resume_from"), recipe)
    try:
        values = merge(read_config(file) if file else {}, flags.values)
    except ConfigError as error:
        if flags.problems:
            raise ConfigError("\n  ".join([str(error), *flags.problems])) from error
        raise
    label = f"recipe {recipe!r}"
    config = None
    if model is not None:
        source = f"--config {file}" if file else ""
        config = validate(
            model, values, options, what=label, sources=flags.sources, source=source, problems=flags.problems
        )
    elif problems := [*flags.problems, *(f"{key}: {recipe!r} takes no configuration" for key in values)]:
        raise ConfigError("\n  ".join([f"{label}: {len(problems)} problems", *problems]))
    function = registry().build(recipe, "recipe")
    name, runs = flags.reserved.get("name", _run_name(recipe)), flags.reserved.get("runs") or "runs"
    return (function, config, name, runs), flags.reserved.get("nproc")


def _config_of(resume_from: Any, recipe: str) -> str | None:
    """Return the initial configuration of the run in a folder, or of a checkpoint's run, if it exists.

    A run of another recipe has other keys; the recipe itself reports an error for it.
    """
    from pathlib import Path

    from twinkle.run import recipe_of

    if not isinstance(resume_from, str):
        return None
    place = Path(resume_from)
    for folder in (place, place.absolute().parent.parent):
        if (folder / "config.yaml").is_file():
            return str(folder / "config.yaml") if recipe_of(folder) in (None, recipe.split("/")[-1]) else None
    return None


def _run(recipe: Any, config: Any, name: str, runs: str) -> None:
    from twinkle.run import Run

    mesh = getattr(config, "device_mesh", None)
    if mesh is not None or Platform.get_world_size() > 1:
        from twinkle.runtime.current import initialize

        initialize(mode="local", global_device_mesh=mesh, seed=getattr(config, "seed", 42))
    plain = config.model_dump(mode="json") if config is not None else {}
    trackers, folder = getattr(config, "trackers", None) or (), getattr(config, "run_folder", None)
    with Run(name, config=plain, trackers=trackers, root=runs, folder=folder) as current:
        summary = recipe(config, current)
    if Platform.is_master():
        _show_summary(summary, str(current.folder))


def _show_summary(summary: Any, folder: str) -> None:
    from twinkle_cli.text import pairs

    values = list(summary.items()) if isinstance(summary, Mapping) else []
    click.echo(pairs([*((str(key), _number(value)) for key, value in values), ("run", folder)]))


def _number(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _run_name(recipe: str) -> str:
    """Return the recipe's own name, without plugin, module or file."""
    import re

    return re.split(r"[/:#]", recipe)[-1]


def _overview() -> str:
    from twinkle._registry import registry

    formatter = click.HelpFormatter()
    formatter.write_usage("twinkle run", "RECIPE [--config FILE] [OPTIONS]")
    formatter.write_paragraph()
    formatter.write_text("Run a recipe; `twinkle run RECIPE --help` shows its options.")
    specs = registry().specs("recipe")
    with formatter.section("Recipes"):
        formatter.write_dl(
            [(name, providers[0].summary) for name, providers in sorted(specs.items())] or [("none", "")]
        )
    return formatter.getvalue().rstrip()


def _help(recipe: str, options: "Mapping[str, Option]") -> str:
    from twinkle._registry import registry

    formatter = click.HelpFormatter(max_width=110)
    formatter.write_usage(f"twinkle run {recipe}", "[--config FILE] [OPTIONS]")
    try:
        summary = registry().find(recipe, "recipe").summary
    except ComponentNotFound:
        summary = ""
    if summary:
        formatter.write_paragraph()
        formatter.write_text(summary)
    with formatter.section("Of every run"):
        formatter.write_dl(_RESERVED_HELP)
    if options:
        with formatter.section("Of this recipe (values are YAML; a list's flag may be repeated)"):
            formatter.write_dl([_help_line(option) for option in options.values()])
    return formatter.getvalue().rstrip()


def _help_line(option: "Option") -> tuple[str, str]:
    if option.group:
        return f"--{option.name}.*" + (" | null" if type(None) in option.types else ""), option.description
    default = "required" if option.required else f"default: {_default_text(option.default)}"
    return f"--{option.name} {option.type_text}", f"{option.description} [{default}]".strip()


def _default_text(value: Any) -> str:
    import json

    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _known_recipes() -> str:
    from twinkle._registry import registry

    return f"there are {', '.join(registry().names('recipe')) or 'none'}"


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Delay the KeyboardInterrupt of a first Ctrl-C to the end of the block; raise that of a second one immediately.

    Outside the main thread, where signals cannot be handled, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            raise KeyboardInterrupt
        heard = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            raise KeyboardInterrupt


def process_count(text: str | None) -> int:
    """Return the number of processes from `--nproc`; 1 if it is absent.

    Raises:
        ConfigError: it is not a number >= 1, or the processes have already been started.
    """
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc must be a number of processes >= 1, got {text}")
    if "WORLD_SIZE" in os.environ and int(text) != Platform.get_world_size():
        raise ConfigError(
            f"--nproc {text}: torchrun has started {Platform.get_world_size()} processes already; omit --nproc"
        )
    return 1 if "WORLD_SIZE" in os.environ else int(text)


def check_mesh(mesh: "DeviceMesh | None", processes: int) -> None:
    """Refuse a mesh whose size differs from the number of processes, before starting them.

    Raises:
        ConfigError: with the right value of `--nproc`.
    """
    if mesh is None or mesh.world_size == processes:
        return
    there = "1 process" if processes == 1 else f"{processes} processes"
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(f"the mesh {mesh} has {mesh.world_size} ranks, and torchrun has started {there}")
    advice = f"--nproc {mesh.world_size}" if mesh.world_size > 1 else "no --nproc"
    raise ConfigError(
        f"the mesh {mesh} has {mesh.world_size} ranks, but the run has {there}; use {advice}, or sizes that "
        f"multiply to {processes}"
    )


def start_ranks(processes: int, arguments: Sequence[str]) -> int:
    """Let torchrun start `twinkle ARGUMENTS` that many times on this machine.

    Returns the exit code of the first rank to fail, or 0. Ctrl-C and SIGTERM are passed on to the ranks, which have ten
    minutes to save their state.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # With several processes on the same CPU cores, threads would only slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    parser = get_args_parser()
    patience = (
        ["--shutdown-timeout=600"] if "--shutdown-timeout" in parser.format_help() else []
    )  # absent in older versions
    launcher = ["--standalone", f"--nproc_per_node={processes}", *patience, "-m", "twinkle_cli"]
    try:
        run(parser.parse_args([*launcher, *without_nproc(arguments)]))  # type: ignore[no-untyped-call]
    except SignalException:
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    return 0


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--nproc N`, which torchrun would interpret as its own flag."""
    rest, remaining = iter(arguments), []
    for argument in rest:
        if argument == "--nproc":
            next(rest, None)
        elif not argument.startswith("--nproc="):
            remaining.append(argument)
    return remaining

"""The command `twinkle` and its group `plugins`: finds built-in commands and commands of plugins, reports errors."""

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from twinkle import __version__

if TYPE_CHECKING:
    from twinkle_registry import CommandSpec
    from twinkle_registry.trust.frozen import Frozen


OWN = {
    "plugins": ("twinkle_cli.plugins:plugins", "List, explain and check plugins"),
    "run": ("twinkle_cli.run:run", "Run a recipe, for example `twinkle run sft`"),
    "version": ("twinkle_cli.version:version", "Show the versions of Twinkle, its plugins and their dependencies"),
}
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_NOTICES_FROM = os.path.join("twinkle", "_registry.py")  # noqa: PTH118 - pathlib is not free to import


class LazyGroup(click.Group):
    """A group whose commands are `module:attribute` until one of them runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, built-in ones and those of plugins."""
        return sorted(self._summaries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; a plain callable of a plugin is wrapped in a command."""
        if cmd_name in OWN:
            module, _, attribute = OWN[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        return plugins_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error for an unknown one has the nearest names."""
        name = args[0]
        if not name.startswith("-") and name not in OWN and name not in self._summaries():
            from twinkle_registry import nearest

            refuse_command(name)
            names = self.list_commands(ctx)
            close = nearest(name, names, 1)
            hint = f"nearest: {close[0]!r}" if close else f"there are {', '.join(names)}"
            ctx.fail(f"no such command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """Return the help text, as wide as the terminal, at most 100 columns."""
        ctx.terminal_width = ctx.terminal_width or _terminal_width()
        return super().get_help(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._summaries().items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command line; a `TwinkleError` prints its message (with `--debug` a traceback) and exits with 2."""
        from twinkle.errors import TwinkleError

        arguments = sys.argv[1:] if args is None else list(args)
        try:
            with warnings.catch_warnings():
                _show_notices_plainly()
                return super().main(arguments, *rest, **extra)
        except TwinkleError as error:
            if "--debug" in arguments:
                import traceback

                click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
            click.echo(f"Error{_rank()}: {error}", err=True)
            from twinkle.runtime.reporting import report

            report(error)
            sys.exit(EXIT_ERROR)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C exits with the code that shells expect."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":  # only one of several ranks reports it
                click.echo("Interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)

    def _summaries(self) -> dict[str, str]:
        """Return name and summary of every command. Importing the registry would triple the time of `--help`."""
        return plugins_summaries(OWN) | {name: summary for name, (_, summary) in OWN.items()}


def plugins_summaries(own: Collection[str], group: str = "") -> dict[str, str]:
    """Return name and summary of every command that plugins add to a group, without importing any.

    Args:
        own: built-in names of the group; a plugin's command with such a name is `plugin/name`.
        group: the first word of the manifest's names, as in `plugins new`; empty for the top.
    """
    from twinkle_registry import Settings, installed_plugins
    from twinkle_registry.discovery import locked_plugins

    settings, frozen = Settings.load(), _frozen()
    by_name: dict[str, list[CommandSpec]] = {}
    for record in [*installed_plugins(__version__), *locked_plugins()]:
        usable = record.status == "ok" and not settings.why_disabled(record.name, record.dist)
        usable = usable and not (frozen and frozen.why_not(record))
        for spec in record.manifest.commands if usable and record.manifest else ():
            of, _, name = spec.name.rpartition(" ")
            if of == group:
                by_name.setdefault(name, []).append(spec)
    summaries = {}
    for name, specs in by_name.items():
        for spec in specs:
            unique = name if len(specs) == 1 and name not in own else f"{spec.dist}/{name}"
            summaries[unique] = spec.summary or f"of {spec.dist}"
    return summaries


def _frozen() -> "Frozen | None":
    from twinkle_registry.settings import is_frozen

    if not is_frozen():
        return None
    from twinkle_registry.trust.frozen import Frozen

    return Frozen()


def refuse_command(name: str, group: str = "") -> None:
    """Raise `NotTrusted` if an installed plugin has this command but may not run it, such as in a frozen run."""
    from twinkle._registry import registry
    from twinkle_registry import NotTrusted

    full = f"{group} {name.rpartition('/')[2]}".strip()
    for record in registry().records:
        commands = record.manifest.commands if record.manifest and isinstance(record.cause, NotTrusted) else ()
        if full in [command.name for command in commands]:
            state = f"plugin {record.name} offers it but is {record.status}"
            raise NotTrusted(f"cannot run `twinkle {full}`: {state}: {record.reason}")


def plugins_command(name: str, group: str = "") -> click.Command | None:
    """Import and return a command that a plugin adds to a group; None if there is no such command."""
    from twinkle._registry import registry

    commands = registry().commands()
    dist, slash, bare = name.rpartition("/")
    full = f"{group} {bare}".strip()
    spec = commands.get(f"{dist}{slash}{full}")
    if spec is None and dist:  # a command with the name of a built-in one
        spec = commands[full] if full in commands and commands[full].dist == dist else None
    if spec is None:
        return None
    from twinkle_registry import ComponentSpec

    component = registry().load(ComponentSpec("command", name, spec.ref, dist=spec.dist))
    return _as_command(name, component, spec.summary)


def _show_notices_plainly() -> None:
    """Print warnings of the registry (unused settings, conflicting commands) as one line without file and code."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *where: Any) -> None:
        if filename.endswith(_NOTICES_FROM):
            click.echo(f"Warning: {message}", err=True)
        else:
            usual(message, category, filename, *where)

    warnings.showwarning = show  # type: ignore[assignment]


def _rank() -> str:
    """Return the rank of this process, for output of several processes on one terminal."""
    return f" [rank {os.environ.get('RANK', '0')}]" if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _terminal_width() -> int:
    # click uses shutil, whose import (with every compression module) takes as long as all of our own.
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal():
        width = int(columns)
    else:
        try:
            width = os.get_terminal_size().columns
        except OSError:
            width = 80
    return max(min(width, 100) - 2, 50)


def _as_command(name: str, component: Any, summary: str) -> click.Command:
    if isinstance(component, click.Command):
        return component
    run: Callable[[list[str]], Any] = component

    @click.command(name, help=summary, context_settings={"ignore_unknown_options": True}, add_help_option=False)
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def command(ctx: click.Context, args: tuple[str, ...]) -> None:
        code = run(list(args))
        ctx.exit(code if isinstance(code, int) else 0)

    return command


def _freeze(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
    """Freeze this command and the processes that it starts."""
    if not given or ctx.resilient_parsing:
        return
    from twinkle_registry.settings import FROZEN_VARIABLE

    before = os.environ.get(FROZEN_VARIABLE)
    os.environ[FROZEN_VARIABLE] = "1"

    def restore() -> None:
        os.environ.pop(FROZEN_VARIABLE)
        if before is not None:
            os.environ[FROZEN_VARIABLE] = before

    ctx.call_on_close(restore)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="twinkle %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.option(
    "--frozen",
    is_flag=True,
    is_eager=True,  # so that `--frozen --help` lists the commands of a frozen run
    expose_value=False,
    callback=_freeze,
    help="Run only what twinkle.lock lists.",
)
def main() -> None:
    """Train large language models with plain loops and plugins."""


OFFERED_BY = {"new": "twinkle-scaffolds", "patches": "twinkle-patches", "test": "twinkle-testing"}
"""Commands of our own distributions that may not be installed."""


class PluginsGroup(click.Group):
    """A group of built-in commands and commands of plugins; built-in ones take precedence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*self.commands, *plugins_summaries(self.commands, "plugins")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a built-in command, or import one of a plugin."""
        return self.commands.get(cmd_name) or plugins_command(cmd_name, "plugins")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; if it is not installed, the error names the package that provides it."""
        name = args[0]
        if not name.startswith("-") and name not in self.commands:
            names = self.list_commands(ctx)
            if name not in names:
                refuse_command(name, "plugins")
            if name not in names and name in OFFERED_BY:
                ctx.fail(f"`twinkle plugins {name}` is part of {OFFERED_BY[name]}; run: pip install {OFFERED_BY[name]}")
            if name not in names:
                from twinkle_registry import nearest

                close = nearest(name, names, 1)
                hint = f"nearest: {close[0]!r}" if close else f"there are {', '.join(names)}"
                ctx.fail(f"no such command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing those of plugins."""
        summaries = {
            name: command.get_short_help_str(100) for name, command in self.commands.items() if not command.hidden
        }
        with formatter.section("Commands"):
            formatter.write_dl(sorted((plugins_summaries(self.commands, "plugins") | summaries).items()))

"""The group `twinkle plugins`, to which plugins add: a manifest's command `plugins new` is `twinkle plugins new`."""

import click

from twinkle_cli.group import plugins_command, plugins_summaries, refuse_command

OFFERED_BY = {"new": "twinkle-scaffolds", "patches": "twinkle-patches", "test": "twinkle-testing"}
"""Commands of our own distributions that an installation may lack."""


class PluginsGroup(click.Group):
    """A group of own commands and of those that plugins add; own ones win."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*self.commands, *plugins_summaries(self.commands, "plugins")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return an own command, or import a plugin's."""
        return self.commands.get(cmd_name) or plugins_command(cmd_name, "plugins")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; one that is not installed is an error that says which package has it."""
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
        own = {name: command.get_short_help_str(100) for name, command in self.commands.items() if not command.hidden}
        with formatter.section("Commands"):
            formatter.write_dl(sorted((plugins_summaries(self.commands, "plugins") | own).items()))

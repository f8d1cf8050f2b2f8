"""`twinkle server`: keys, status and content of a data folder, for operators."""

import click

from twinkle_server.cli import backups, checking, keys, merge, status, trash
from twinkle_server.cli.common import HELP


@click.group("server", context_settings=HELP)
def main() -> None:
    """Manage a training service: keys, status, settings, backups, and the content of its folder."""


for _command in (
    keys.keys, status.status, status.ready, checking.print_settings, checking.check, merge.merge, backups.backup,
    backups.restore, backups.verify_backup, backups.set_aside, trash.trash, trash.orphans,
):  # fmt: skip
    main.add_command(_command)

# Written by `twinkle plugins types`; do not edit.
"""The command line: `main` of the command `twinkle`, `CLI` and `Args` for scripts, helpers for plugins' commands."""

from twinkle._registry import lazy_names


from twinkle_cli.arguments import Args as Args
from twinkle_cli.arguments import CLI as CLI
from twinkle_cli.group import main as main
from twinkle_cli.text import echo_json as echo_json
from twinkle_cli.text import pairs as pairs
from twinkle_cli.trust import confirmed as confirmed

"""The help text of script arguments: every group with its arguments, types, defaults and meanings."""

import json
import textwrap
from typing import Any

from twinkle_cli.arguments.names import GROUPS, arguments, short_name
from twinkle_cli.configuration import Option

WIDTH = 110
_HEAD = """\
Arguments of the script. A later source wins: defaults, .env file, environment, --config FILE, command line.

  --config FILE          YAML file with any of the arguments, flat or below the names of their groups
  --extra.NAME VALUE     an additional argument of the script
  --help                 show this text and exit

Each may also be written with its group (--training.max_steps) and set by TWINKLE_MAX_STEPS or
TWINKLE_TRAINING__MAX_STEPS. Truth values: --flag, --no-flag, --flag false. Lists and mappings are YAML.
"""


def help_text() -> str:
    """Return the whole text."""
    sections: dict[str, list[str]] = {group: [] for group in GROUPS}
    for option, field in arguments():
        names = [short_name(option)]
        if alias := field.metadata["alias"]:
            names.append(alias)
        if option.path == ("model", "strategy"):
            names.append("use_megatron")
        sections[option.path[0]].append(_line(option, names))
    parts = [_HEAD]
    for group, lines in sections.items():
        parts.append(f"{group}: {(GROUPS[group].__doc__ or '').strip()}\n" + "".join(lines))
    return "\n".join(parts)


def _line(option: Option, names: list[str]) -> str:
    head = f"  {', '.join(f'--{name}' for name in names)}  {option.type_text}"
    meaning = f"{option.description} [default: {default_text(option.default)}]"
    body = textwrap.fill(meaning, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f"{head}\n{body}\n"


def default_text(value: Any) -> str:
    """Return a default in YAML syntax."""
    return value if isinstance(value, str) and value else json.dumps(value)

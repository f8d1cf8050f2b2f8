"""Arguments from the environment and from `.env` files: `TWINKLE_<ARGUMENT>` and `TWINKLE_<GROUP>__<ARGUMENT>`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from twinkle.errors import ConfigError

PREFIX = "TWINKLE_"
OTHERS = frozenset({
    "CACHE", "CACHE_DIR", "CONFIG", "DEFAULT_HUB", "DEFAULT_SAVE_DIR", "DISABLE_FAST_PATHS", "DIST_TIMEOUT_SECONDS",
    "FAIL_FAST", "FORBID_HF", "FROZEN", "LOCK", "LOG_LEVEL", "LONG_POLL_TIMEOUT", "MEMORY_LIMIT", "MODEL_ID_ALIASES",
    "NAME", "NOTIFIER", "POLL_INTERVAL", "PRINT_FORMAT", "RELEASE", "RUN_ID", "SESSION_ID", "STATE_DIR",
    "TEST_ROUND_BY_ROWS", "TOKEN_SALT", "TRUST_FOLDER",
})  # fmt: skip
"""Variables of other parts of Twinkle, which are not arguments; without the prefix."""
OTHER_FAMILIES = ("AUTO", "CKPT", "CPU", "LLM", "NPU", "PER", "PERSISTENCE", "PLUGINS", "SERVER", "TELEMETRY", "VLLM")
"""First words of such variables: `TWINKLE_SERVER_URL` is one, the argument is `TWINKLE_SERVER__HOST`."""


def named(variables: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield variable, name of the argument (`training.max_steps`) and value of all variables that set an argument.

    An empty value unsets a variable for one command in a shell, so it counts as absent.
    """
    for variable, text in variables.items():
        if text.strip() and variable.startswith(PREFIX) and not is_other(variable):
            yield variable, variable.removeprefix(PREFIX).lower().replace("__", "."), text


def is_other(variable: str) -> bool:
    """Return whether the variable belongs to another part of Twinkle."""
    name = variable.removeprefix(PREFIX)
    family, _, rest = name.partition("_")
    return name in OTHERS or (family in OTHER_FAMILIES and bool(rest) and not rest.startswith("_"))


def read_env_file(path: str | Path) -> dict[str, str]:
    """Return the variables of a file of `NAME=value` lines.

    `export` before the name, quotes around the value and comments are supported; variables are not expanded.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"env_file {path}: cannot be read: {reason}") from error
    variables = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"env_file {path}, line {number}: {line.strip()!r} is not NAME=value")
        variables[name.strip()] = _value(value.strip(), f"env_file {path}, line {number}")
    return variables


def _value(text: str, where: str) -> str:
    if text[:1] in ("'", '"'):
        inside, closed, rest = text[1:].partition(text[0])
        if not closed or (rest.strip() and not rest.strip().startswith("#")):
            raise ConfigError(f"{where}: the quote {text[0]} of {text} is not closed")
        return inside
    return text.partition(" #")[0].strip()

"""`CLI.from_args()`: one call that reads a script's arguments from all sources, in a fixed order."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.errors import ConfigError
from twinkle_cli.arguments.args import Args
from twinkle_cli.arguments.layers import Layer, from_env_file, from_flags, from_mapping, from_variables
from twinkle_cli.arguments.names import EXTRA, USE_MEGATRON

STRATEGY = ("model", "strategy")
REMOTE_CODE = ("model", "trust_remote_code")


class CLI:
    """The arguments of a training script."""

    @staticmethod
    def from_args(
        argv: Sequence[str] | None = None,
        env_file: str | os.PathLike[str] | None = None,
        config_file: str | os.PathLike[str] | None = None,
    ) -> Args:
        """Read all arguments. A later source wins: defaults, `.env` file, environment, YAML file, command line.

        Args:
            argv: the command line without the script's name; by default that of this process; then an invalid
                argument in any source is reported on stderr and the process exits with code 2, as with argparse.
                `--help` prints all arguments and exits.
            env_file: file with `TWINKLE_*` variables; by default `.env` in the working directory, if it exists.
            config_file: YAML file; `--config` overrides it.

        Raises:
            ConfigError: with `argv`, for unknown arguments, values of the wrong type and unreadable files; all problems
                at once.
        """
        if argv is not None:
            return _read(argv, env_file, config_file)
        try:
            return _read(sys.argv[1:], env_file, config_file)
        except ConfigError as error:
            sys.stderr.write(f"Error: {error}\n")
            raise SystemExit(2) from error


def _read(
    words: Sequence[str], env_file: str | os.PathLike[str] | None, config_file: str | os.PathLike[str] | None
) -> Args:
    flags, reserved = from_flags(["--help" if word == "-h" else word for word in words])
    if "help" in reserved:
        from twinkle_cli.arguments.help import help_text

        sys.stdout.write(help_text())
        raise SystemExit(0)
    file = reserved.get("config", config_file)
    layers = [_env_file(env_file), from_variables(os.environ, where=""), _config_file(file), flags]
    return _merged(layers)


def _env_file(path: str | os.PathLike[str] | None) -> Layer:
    from twinkle_cli.arguments.variables import read_env_file

    file = Path(".env" if path is None else path)
    if path is None and not file.is_file():
        return Layer()
    try:
        layer = from_env_file(file, read_env_file(file), os.environ)
    except ConfigError as error:
        return Layer(problems=[str(error)])
    if path is None:  # not named by the user: it may be part of a folder from someone else
        layer.problems += _needs_trust(layer)
    return layer


def _needs_trust(layer: Layer) -> list[str]:
    """Return a problem for each value that lets code run from a folder that is not trusted."""
    from twinkle_registry.trust.folders import is_trusted_folder

    asking = [path for path, value in layer.values.items() if (path == REMOTE_CODE and value) or ".py:" in str(value)]
    here = str(Path.cwd())
    if not asking or is_trusted_folder(here):
        return []
    folder = shlex.quote(here)
    return [
        f"{'.'.join(path)}: {layer.sources[path]} would let code run, but this folder is not trusted; set it on the "
        f"command line, pass the file as env_file=, or review the file and run: twinkle plugins trust {folder}"
        for path in asking
    ]


def _config_file(path: str | os.PathLike[str] | None) -> Layer:
    from twinkle_cli.configuration import read_config

    if path is None:
        return Layer()
    try:
        return from_mapping(read_config(str(path)), where=str(path))
    except ConfigError as error:
        return Layer(problems=[str(error)])


def _merged(layers: Sequence[Layer]) -> Args:
    """Merge the layers, later ones over earlier ones; mappings are merged key by key."""
    args, set_paths = Args(), set()
    problems = [problem for layer in layers for problem in layer.problems]
    for layer in layers:
        problems += _settle_strategy(layer, args.model.strategy)
        for path, value in layer.values.items():
            set_paths.add(".".join(path[:2]))
            _set(args, path, value)
    if problems:
        unknown = any("unknown" in problem for problem in problems)
        hint = ["additional arguments of the script must be below extra: --extra.NAME VALUE"] if unknown else []
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the arguments of the script", *problems, *hint]))
    args._given = frozenset(set_paths)
    return args


def _settle_strategy(layer: Layer, below: str) -> list[str]:
    """Convert `use_megatron` of a layer to `strategy`; `below` is the strategy by earlier layers."""
    use_megatron = layer.values.pop(USE_MEGATRON, None)
    if use_megatron is None:
        return []
    strategy = layer.values.get(STRATEGY)
    if strategy is not None and use_megatron != (strategy == "megatron"):
        return [
            f"model.strategy is {strategy!r} by {layer.sources[STRATEGY]}, but use_megatron is {use_megatron} by "
            f"{layer.sources[USE_MEGATRON]}; give one of the two"
        ]
    if use_megatron:
        layer.values[STRATEGY] = "megatron"
    elif below == "megatron":
        layer.values[STRATEGY] = "accelerate"
    return []


def _set(args: Args, path: tuple[str, ...], value: Any) -> None:
    if path[0] == EXTRA:
        _put(args.extra, path[1:], value)
        return
    group = getattr(args, path[0])
    box = {path[1]: getattr(group, path[1])}
    _put(box, path[1:], value)
    setattr(group, path[1], box[path[1]])


def _put(target: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set `target[path[0]][path[1]]...`; a mapping is merged into an existing one. The arguments are not modified."""
    from twinkle_cli.configuration import merge

    if not path:
        target.update(merge(target, value))
        return
    for key in reversed(path[1:]):
        value = {key: value}
    before = target.get(path[0])
    both = isinstance(before, Mapping) and isinstance(value, Mapping)
    target[path[0]] = merge(before, value) if both else value  # type: ignore[arg-type]

"""`twinkle serve MODEL`, and the flags of its settings, which other commands share."""

import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from annotated_types import Ge, Gt, Le
from click.core import ParameterSource

from twinkle.errors import ConfigError
from twinkle_registry.naming import nearest_or_all
from twinkle_server.cli.common import ENVIRONMENT, HELP, user_errors
from twinkle_server.configuration import Effective, Entry, entries
from twinkle_server.settings import bare

if TYPE_CHECKING:
    from click.decorators import FC

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `twinkle serve`; type, bounds and default come from the setting.

    Attributes:
        key: of the setting in the configuration file.
        names: of the flag, as in click; `--no-x` alone sets a switch to False.
        help: one or two sentences.
        unit: of the value in units of the setting: 0.001 for milliseconds of a setting in seconds.
        metavar: name of the value in the help.
    """

    key: str
    names: str
    help: str
    unit: float = 1.0
    metavar: str | None = None


FLAGS: Final = (
    Flag("data", "--data", "Folder for all state."),
    Flag("network.host", "--host", "Address to listen on."),
    Flag("network.port", "--port", "0 uses a free port."),
    Flag("name", "--name", "Name of the model for clients; by default the hub id, or the last part of a folder."),
    Flag("tokenizer", "--tokenizer", "Where clients load the tokenizer: an id at Hugging Face, or a path of theirs."),
    Flag("template", "--template", "The chat template of `/v1`, a component.", metavar="NAME"),
    Flag("network.root_path", "--root-path", "Prefix that a proxy removes, such as /twinkle.", metavar="PREFIX"),
    Flag(
        "network.trusted_proxies",
        "--trusted-proxy",
        "Address or network of a proxy whose X-Forwarded-* headers are believed; repeatable.",
        metavar="ADDRESS",
    ),
    Flag("network.tls_cert", "--tls-cert", "Certificate chain for HTTPS (PEM); SIGHUP reads it again."),
    Flag("network.tls_key", "--tls-key", "Private key of the certificate (PEM), if it is in another file."),
    Flag("access.auth", "--no-auth", "Serve without keys; only on the loopback interface."),
    Flag(
        "engine.max_pass_seconds",
        "--max-pass-ms",
        "Approximate time that a sampling step may wait for training; a running pass is not interrupted.",
        unit=0.001,
    ),
    Flag(
        "engine.pass_tokens",
        "--pass-tokens",
        "Tokens per pass; rows are never split. The default depends on the size of the model.",
    ),
    Flag(
        "engine.full_parameters",
        "--allow-full-parameters",
        "Allow a session to train all parameters of the model; it has the service for itself meanwhile.",
    ),
    Flag(
        "losses.allowed",
        "--loss",
        "A loss plugin that requests may use; repeatable. By default every tenant-safe one.",
        metavar="NAME",
    ),
    Flag("losses.custom", "--custom-losses", "Allow clients to register loss graphs."),
    Flag(
        "losses.strict",
        "--strict-losses",
        "Refuse `stable_reinforce`, which has Twinkle's own formula because Tinker's is not public.",
    ),
    Flag(
        "losses.workers",
        "--loss-workers/--no-loss-workers",
        "Compute the losses of plugins in separate processes. Without them, a loss that hangs or crashes stops all.",
    ),
    Flag(
        "losses.in_process",
        "--loss-in-process",
        "A plugin whose losses run in the engine process; repeatable.",
        metavar="PLUGIN",
    ),
    Flag("times.loss", "--loss-seconds", "Time limit for the loss of a plugin per operation."),
    Flag("limits.loss_bytes", "--loss-memory-mb", "Memory limit for the loss of a plugin.", unit=2**20),
    Flag(
        "access.local_metrics",
        "--local-metrics",
        "Answer /metrics and status to programs on this machine without a key; not behind a proxy on this machine.",
    ),
    Flag(
        "start.take_over", "--take-over", "Take the folder from a service on another machine that you know to be dead."
    ),
    Flag(
        "start.accept_base",
        "--accept-base",
        "Serve MODEL although the adapters of that name in the folder were trained on another model or other files.",
    ),
    Flag(
        "times.trash",
        "--trash-hours",
        "Time that deleted and expired checkpoints are kept in the trash.",
        unit=3600,
    ),
    Flag(
        "datasets.sets",
        "--data-set",
        "A data set that requests may name: a file, a folder or a hub's id by the id that clients use; repeatable.",
        metavar="ID=PLACE",
    ),
    Flag(
        "datasets.hubs",
        "--data-hub",
        "A hub from which requests may load data sets and tokenizers; repeatable. By default none.",
    ),
    Flag(
        "datasets.resources",
        "--data-resources",
        "Data sets, loaders and other data resources of a tenant; 0 turns them off.",
    ),
    Flag("datasets.memory", "--data-memory-mb", "Memory limit of the process of a data resource.", unit=2**20),
    Flag("datasets.seconds", "--data-seconds", "Time limit of one call of a data resource."),
    Flag(
        "uploads.enabled",
        "--uploads/--no-uploads",
        "Upload checkpoints to Hugging Face and ModelScope for tenants, with their own tokens.",
    ),
    Flag(
        "rollouts.rows",
        "--rollouts",
        "Newest sampled rows of each run that are kept for the dashboard; 0 records none.",
    ),
    Flag(
        "rollouts.operator",
        "--operators-read-rollouts",
        "Show texts of recorded rows to operators, too, not only to their tenant.",
    ),
    Flag("dashboard", "--dashboard/--no-dashboard", "Serve the dashboard at /."),
    Flag(
        "traces.otlp_endpoint",
        "--otlp-endpoint",
        "Send OpenTelemetry traces to this collector (OTLP over HTTP). Default: $OTEL_EXPORTER_OTLP_ENDPOINT.",
        metavar="URL",
    ),
    Flag(
        "traces.share",
        "--trace-share",
        "Share of the requests that are traced if their client does not decide. Default: $OTEL_TRACES_SAMPLER.",
    ),
    Flag("log_level", "--log-level", "Log level on standard error; `debug` logs every operation."),
    Flag(
        "engine.backend",
        "--backend",
        "The engine that trains and samples (`twinkle plugins list engine`). By default the only installed one.",
        metavar="NAME",
    ),
)
"""Settings that have a flag. The others are set in the configuration file only."""
_CONFIG: Final = click.option(
    "-c",
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=f"{ENVIRONMENT}_CONFIG",
    help="Configuration file (YAML); flags override it.",
)


def settings_options(command: F) -> F:
    """Add MODEL, `--config` and all flags of settings to a command, which gets them as keyword arguments."""
    by_key = {entry.key: entry for entry in entries()}
    for flag in reversed(FLAGS):
        command = _option(flag, by_key[flag.key])(command)
    return click.argument("model", required=False, envvar=f"{ENVIRONMENT}_MODEL")(_CONFIG(command))


def parameter_of(key: str) -> str:
    """Return the name of the click parameter that sets a key of the configuration file."""
    return key.replace(".", "__")


def _option(flag: Flag, entry: Entry) -> "Callable[[FC], FC]":
    kind = bare(entry.annotation)
    options: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar, "envvar": variable(flag)}
    if typing.get_origin(kind) is Mapping:
        return click.option(flag.names, parameter_of(flag.key), multiple=True, callback=_pairs, **options)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        choice = click.Choice(typing.get_args(item)) if typing.get_origin(item) is typing.Literal else str
        return click.option(flag.names, parameter_of(flag.key), multiple=True, type=choice, **options)
    default = None if entry.default in (MISSING, None, "") else _scaled(entry.default, 1 / flag.unit)
    if kind is bool:
        switch = "/" in flag.names
        default = bool(default) if switch else False
        return click.option(
            flag.names, parameter_of(flag.key), is_flag=True, default=default, show_default=switch, **options
        )
    kind = _click_type(flag, entry)
    return click.option(
        flag.names, parameter_of(flag.key), type=kind, default=default, show_default=default is not None, **options
    )


def _pairs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return names and values of `NAME=VALUE`; a path becomes absolute."""
    pairs = {}
    for text in texts:
        name, equals, place = text.partition("=")
        if not name or not equals or not place:
            raise click.BadParameter(f"must be {parameter.metavar}, got {text!r}", context, parameter)
        pairs[name] = place if "://" in place else str(Path(place).expanduser().absolute())
    return pairs


def _click_type(flag: Flag, entry: Entry) -> Any:
    kind = bare(entry.annotation)
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    if kind in (int, float):
        scale = 1 / flag.unit
        low, high = (None if bound is None else _scaled(bound, scale) for bound in bounds(entry.annotation))
        if kind is float:
            return click.FloatRange(low, high, min_open=_is_open(entry.annotation))
        return click.IntRange(1 if low == 0 and scale < 1 else low, high)
    return str


def _scaled(value: Any, scale: float) -> Any:
    scaled = value * scale if scale != 1 else value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(scaled)
    return round(scaled, 9) if isinstance(value, float) else scaled


def bounds(annotation: Any) -> tuple[Any, Any]:
    """Return the smallest and largest value of a number's type; None is unbounded."""
    low = high = None
    for mark in _marks(annotation):
        low = mark.ge if isinstance(mark, Ge) else mark.gt if isinstance(mark, Gt) else low
        high = mark.le if isinstance(mark, Le) else high
    return low, high


def _is_open(annotation: Any) -> bool:
    return any(isinstance(mark, Gt) for mark in _marks(annotation))


def _marks(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [mark for member in typing.get_args(annotation) for mark in _marks(member)]
    return list(getattr(annotation, "__metadata__", ()))


def effective(context: click.Context, *, partial: bool = False) -> Effective:
    """Return the effective settings of a command with `settings_options`.

    Args:
        context: of the command.
        partial: see `configuration.load`.

    Raises:
        ConfigError: see `configuration.load` and `given`.
    """
    from twinkle_server.configuration import load

    values, sources = given(context)
    return load(context.params["config"], values, sources, partial=partial)


def given(context: click.Context) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the settings that flags and variables set by key, and the flag or variable of each.

    Raises:
        ConfigError: a variable with the prefix `TWINKLE_SERVE_` is unknown.
    """
    _check_variables()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    names = {parameter_of(flag.key): flag for flag in FLAGS} | {"model": None}
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name not in names or source not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue
        flag, value = names[name], context.params[name]
        if flag is None:
            values["model"], sources["model"] = value, f"{ENVIRONMENT}_MODEL" if _from_variable(source) else "MODEL"
            continue
        values[flag.key] = _setting(flag, value)
        sources[flag.key] = variable(flag) if _from_variable(source) else option.opts[0]
    return values, sources


def _check_variables() -> None:
    known = {f"{ENVIRONMENT}_CONFIG", f"{ENVIRONMENT}_MODEL", *map(variable, FLAGS)}
    unknown = sorted(name for name in os.environ if name.startswith(f"{ENVIRONMENT}_") and name not in known)
    if unknown:
        raise ConfigError(
            "\n".join(f"{name}: unknown environment variable; {nearest_or_all(name, known)}" for name in unknown)
        )


def _from_variable(source: ParameterSource) -> bool:
    return source is ParameterSource.ENVIRONMENT


def variable(flag: Flag) -> str:
    """Return the name of a flag's environment variable."""
    return f"{ENVIRONMENT}_{flag.names.partition('/')[0].removeprefix('--').replace('-', '_').upper()}"


def _setting(flag: Flag, value: Any) -> Any:
    """Return a flag's value in the unit of its setting."""
    if isinstance(value, bool):
        return not value if flag.names.startswith("--no-") else value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return value * flag.unit if flag.unit != 1 else value


@click.command("serve", context_settings=HELP)
@settings_options
@click.pass_context
def main(context: click.Context, /, **_values: Any) -> None:
    """Serve MODEL, a local folder or the id of a model on a hub, to clients of the Tinker protocol.

    The first start on an empty folder creates an operator key and prints it once; `twinkle server keys create` creates
    more keys. On SIGTERM, the service finishes running operations, saves its state, and exits. Every flag can also be
    set by a variable (`TWINKLE_SERVE_PORT` for `--port`) or in the file of `--config`; flags override variables, and
    variables override the file.
    """
    from dataclasses import replace

    from twinkle_server.serve import serve

    settings = effective(context).settings
    settings = replace(settings, data=settings.data.expanduser().absolute())
    with user_errors():
        code = serve(settings)
    context.exit(code)

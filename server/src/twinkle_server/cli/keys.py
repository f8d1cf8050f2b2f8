"""`twinkle server keys`: keys of tenants, and their quotas."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from twinkle_server.cli.common import HELP, as_json_option, data_folder, echo, with_store

if TYPE_CHECKING:
    from twinkle_server.store.records import Key

F = TypeVar("F", bound=Callable[..., Any])
_NONE = "none"


QUOTAS = {
    "tokens_per_second": "Average limit of tokens per second.",
    "operations": "Limit of pending operations.",
    "adapters": "Limit of models.",
    "bytes": "Limit of all checkpoints together.",
    "keep": "Newest checkpoints of a model and kind that are kept.",
    "weight": "Share of the computed tokens when several tenants wait, relative to 1.",
    "rollouts": "Recorded rows of a run that are kept for the dashboard; 0 records none.",
}


@click.group(context_settings=HELP)
def keys() -> None:
    """Create, change, list and revoke keys; a running server notices changes within seconds."""


class QuotaType(click.ParamType):  # type: ignore[type-arg] # generic only to the type checker
    """The value of a quota: a number, or where a quota is changed, `none`."""

    name = "number"

    def __init__(self, removable: bool) -> None:
        self._removable = removable

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        if self._removable and value == _NONE:
            return value
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} must be a number" + " or 'none'" * self._removable, param, ctx)
        return int(number) if number.is_integer() else number


def quota_options(removable: bool) -> Callable[[F], F]:
    """Add an option for each quota of a key; the command gets them as keyword arguments.

    Args:
        removable: whether `none` removes a quota.
    """

    def add(command: F) -> F:
        for name, text in reversed(QUOTAS.items()):
            flag = f"--{name.replace('_', '-')}"
            command = click.option(flag, f"quota_{name}", type=QuotaType(removable), help=text)(command)
        return command

    return add


def _quotas(values: dict[str, Any]) -> dict[str, Any]:
    """Return the quotas that were given, by name; None removes one."""
    given = {name: values[f"quota_{name}"] for name in QUOTAS}
    return {name: None if value == _NONE else value for name, value in given.items() if value is not None}


@keys.command(context_settings=HELP)
@click.argument("name")
@data_folder
@click.option("--role", type=click.Choice(["user", "operator"]), default="user", show_default=True, help="What it may.")
@click.option("--tenant", help="Tenant of the key: keys of one tenant see the same runs. By default NAME.")
@quota_options(removable=False)
@as_json_option
def create(name: str, data: Path, role: str, tenant: str | None, as_json: bool, **quotas: Any) -> None:
    """Create a key and print it once."""
    from twinkle_server.tenancy.keys import issue

    kind: Any = role
    key = with_store(data, lambda store: issue(store, name, role=kind, tenant=tenant, quotas=_quotas(quotas)))
    echo({"name": name, "key": key}, as_json, [key])


@keys.command("set", context_settings=HELP)
@click.argument("name")
@data_folder
@quota_options(removable=True)
@as_json_option
def set_quotas(name: str, data: Path, as_json: bool, **quotas: Any) -> None:
    """Change quotas of the key NAME; `none` removes one, and the others stay.

    A running service applies the change within seconds. It is recorded in the audit log.
    """
    from twinkle_server.tenancy.keys import change

    changes = _quotas(quotas)
    if not changes:
        raise click.UsageError(f"specify what to change: {', '.join('--' + word.replace('_', '-') for word in QUOTAS)}")
    key = with_store(data, lambda store: change(store, name, changes))
    echo(_fields(key), as_json, [_line(key)])


@keys.command("list", context_settings=HELP)
@data_folder
@click.option("--all", "revoked", is_flag=True, help="Also list revoked keys.")
@as_json_option
def list_keys(data: Path, revoked: bool, as_json: bool) -> None:
    """List keys by name; the keys themselves are not stored."""
    rows = with_store(data, lambda store: store.keys.all(revoked=revoked))
    echo([_fields(key) for key in rows], as_json, [_line(key) for key in rows] or ["no keys"])


@keys.command(context_settings=HELP)
@click.argument("name")
@data_folder
@as_json_option
def revoke(name: str, data: Path, as_json: bool) -> None:
    """Revoke a key; the data of its tenant is kept."""
    from twinkle_server.tenancy.keys import revoke as end

    key = with_store(data, lambda store: end(store, name))
    echo(_fields(key), as_json, [f"revoked {key.name}"])


def _fields(key: "Key") -> dict[str, Any]:
    return {
        "name": key.name,
        "tenant": key.tenant,
        "role": key.role,
        "created": key.created,
        "revoked": key.revoked,
        "quotas": key.quotas,
    }


def _line(key: "Key") -> str:
    day = datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d")
    quotas = "".join(f"  {name}={_number(value)}" for name, value in key.quotas.items())
    ended = "  revoked" if key.revoked else ""
    return f"{key.name}  {key.role}  tenant {key.tenant}  since {day}{quotas}{ended}"


def _number(value: float) -> str:
    """Return a number with all of its digits: `1000000`, `0.25`."""
    return str(int(value)) if float(value).is_integer() else repr(value)

"""The components beside losses that a request may name, and the options that it may give them.

They run in the engine process, so a plugin must declare them safe for tenants and served, and it must ship with Twinkle
or be named by the operator. A name is never a reference to code: no client can make the service import something.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from twinkle import registry
from twinkle_registry import ComponentSpec, nearest
from twinkle_server.engine.errors import UserError

SHIPPED: Final[Mapping[str, str]] = {
    "metric": "twinkle-metrics",
    "optimizer": "twinkle-transformers",
    "patch": "twinkle-patches",
    "processor": "twinkle-data",
    "scheduler": "twinkle-transformers",
    "template": "twinkle-chat",
}
"""The distribution of each kind that ships with Twinkle."""
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_.-]{1,100}/)?[A-Za-z0-9_]{1,100}")
_FIXED: Final[Mapping[str, Mapping[str, str]]] = {
    "metric": {"device_mesh": "the service's", "process_group": "the service's"},
    "optimizer": {"params": "all weights of the adapter"},
    "processor": {"device_mesh": "the service's"},
    "scheduler": {"optimizer": "the adapter's"},
    "template": {
        "model_id": "the served model", "tokenizer": "the served model's", "device_mesh": "the service's",
        "loss_scale": "that of the rows; encode them where you can read the data",
    },
}  # fmt: skip
"""Options that a client cannot choose, and what they are instead."""
_MOST: Final[Mapping[str, int]] = {"top_k_kl": 1000, "GKDLoss.chunk_size": 2048}
"""Upper bounds of options, of all components or of one, that decide how much memory a component takes."""
_DEPTH, _ITEMS, _CHARACTERS = 4, 4096, 2**16


def find(kind: str, name: str, in_process: Sequence[str] = ()) -> ComponentSpec:
    """Return the component that a request names.

    Args:
        kind: of the component, other than a loss.
        name: `Name` or `dist/Name`.
        in_process: further distributions whose components may run in this process.

    Raises:
        UserError: there is none of this name, or it may not be used here.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{kind} must be the name of a component that is installed on the service, got {name[:80]!r}; files, "
            "modules and references to a Hub are not accepted"
        )
    available = _available(kind, in_process)
    dist, _, own = name.rpartition("/")
    spec = available.get(own)
    if spec is None or (dist and spec.dist != dist):
        close = nearest(own, available)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        listed = ", ".join(sorted(available)) or "none"
        reason = _why_unsafe(kind, own)
        raise UserError(f"no {kind} {name[:80]!r} can be used on this service{reason or hint}; available: {listed}")
    return spec


def _why_unsafe(kind: str, name: str) -> str:
    """Return why an installed component may not be used, or an empty string."""
    if kind == "patch" and name in registry().specs(kind):
        return ": it changes the base model, which all tenants share, and is not marked as safe (tenant_safe)"
    return ""


def names(kind: str, in_process: Sequence[str] = ()) -> list[str]:
    """Return the names of the components of a kind that requests may use."""
    return sorted(_available(kind, in_process))


def _available(kind: str, in_process: Sequence[str]) -> dict[str, ComponentSpec]:
    shipped = {r.package for r in registry().records if r.name == r.dist == SHIPPED.get(kind)}
    found = {}
    for name, specs in registry().specs(kind).items():
        safe = [spec for spec in specs if spec.tenant_safe and "served" in spec.runtimes]
        allowed = [spec for spec in safe if spec.dist in in_process or _is_own(spec, kind, shipped)]
        if len(allowed) == 1:
            found[name] = allowed[0]
    return found


def _is_own(spec: ComponentSpec, kind: str, packages: set[str]) -> bool:
    """Return whether a component ships with Twinkle; optimizers and schedulers may be torch's."""
    package = spec.ref.partition(":")[0].partition(".")[0]
    return spec.dist == SHIPPED.get(kind) and (package in packages or package == "torch")


def check_options(kind: str, name: str, options: Mapping[str, Any], in_process: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options of a component after checking that they are plain, small, and the client's to choose.

    Raises:
        UserError: an option is not.
    """
    fixed = _FIXED.get(kind, {})
    for option, value in options.items():
        if option in fixed:
            raise UserError(f"{kind} {name!r}: {option} cannot be set on a service; it is {fixed[option]}")
        check_bound(kind, name, option, value)
        _check_plain(f"{kind} {name!r}: {option}", value, _DEPTH)
    if kind == "scheduler" and "schedulers" in options:
        return {**options, "schedulers": [_part(item, in_process) for item in _parts(name, options["schedulers"])]}
    return dict(options)


def check_bound(kind: str, name: str, option: str, value: Any) -> None:
    """Refuse an option that would let a component take too much memory.

    Raises:
        UserError: the option is above its bound.
    """
    most = _MOST.get(f"{name.rpartition('/')[2]}.{option}", _MOST.get(option))
    if most is not None and isinstance(value, int | float) and value > most:
        raise UserError(f"{kind} {name!r}: {option} must be at most {most} on a service, got {value:g}")


def _parts(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"scheduler {name!r}: schedulers must be a list, got a {type(value).__name__}")
    return value


def _part(item: Any, in_process: Sequence[str]) -> dict[str, Any]:
    """Check an item of `schedulers`, which names a component itself."""
    if not isinstance(item, dict) or not isinstance(item.get("scheduler"), str):
        raise UserError("items of schedulers must be mappings such as {'scheduler': 'LinearLR', 'total_iters': 10}")
    spec = find("scheduler", item["scheduler"], in_process)
    rest = {option: value for option, value in item.items() if option != "scheduler"}
    return {"scheduler": f"{spec.dist}/{spec.name}"} | check_options("scheduler", spec.name, rest, in_process)


def _check_plain(where: str, value: Any, depth: int) -> None:
    if value is None or isinstance(value, bool | int | float):
        return
    if isinstance(value, str):
        if len(value) > _CHARACTERS:
            raise UserError(f"{where} must have at most {_CHARACTERS} characters, got {len(value)}")
        return
    if not isinstance(value, list | dict) or depth == 0:
        raise UserError(
            f"{where} must be a number, a text, or a list or mapping of these, got a {type(value).__name__}"
        )
    if len(value) > _ITEMS:
        raise UserError(f"{where} must have at most {_ITEMS} items, got {len(value)}")
    for item in value.values() if isinstance(value, dict) else value:
        _check_plain(where, item, depth - 1)

"""`rank_pattern` and `alpha_pattern`: numbers of single layers, as PEFT reads them."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from twinkle.errors import ArgumentError

V = TypeVar("V")
FIELDS = ("rank_pattern", "alpha_pattern")


def value_at(pattern: Mapping[str, V], layer: str, default: V) -> V:
    """Return the value of the first key that matches a layer, or the default.

    As in PEFT, a key is a regular expression for the end of the layer's path, which begins at the path's start or after
    a dot.
    """
    key = key_at(pattern, layer)
    return default if key is None else pattern[key]


def key_at(pattern: Iterable[str], layer: str) -> str | None:
    """Return the first key that matches a layer, if one does."""
    return next((key for key in pattern if _compiled(key).match(layer)), None)


@lru_cache(maxsize=4096)
def _compiled(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def check_patterns(name: str, config: Any, layers: Iterable[str] | None = None) -> None:
    """Check the patterns of a configuration.

    Args:
        name: of the adapter, for errors.
        config: a `peft.LoraConfig`.
        layers: the layers that it adapts; None does not check that every key matches one.

    Raises:
        ArgumentError: a key is not a regular expression or matches no layer, or a value is not a rank or not finite.
    """
    adapted = None if layers is None else list(layers)
    for field in FIELDS:
        for key, value in (getattr(config, field) or {}).items():
            _check_value(name, field, key, value)
            try:
                expression = _compiled(key)
            except (re.error, RecursionError, OverflowError) as error:
                raise ArgumentError(
                    f"adapter {name!r}: {field} has the key {key!r}, which is not a regular expression: {error}"
                ) from error
            if adapted is not None and not any(map(expression.match, adapted)):
                raise ArgumentError(
                    f"adapter {name!r}: {field} has the key {key!r}, which matches none of the adapted layers; their "
                    f"names are {_last_names(adapted)}, such as {next(iter(adapted), 'none')}"
                )


def _check_value(name: str, field: str, key: Any, value: Any) -> None:
    if field == "rank_pattern" and (type(value) is not int or value < 1):
        raise ArgumentError(
            f"adapter {name!r}: ranks in rank_pattern must be integers of at least 1, got {value!r} for {key!r}"
        )
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ArgumentError(f"adapter {name!r}: {field} must have finite numbers, got {value!r} for {key!r}")


def settle_order(config: Any, layers: Iterable[str]) -> None:
    """Make the patterns of a configuration independent of the order of their keys, which PEFT's files sort.

    Patterns that have another meaning in sorted order are replaced by one with the full name of each layer.

    Args:
        config: a `peft.LoraConfig`, which is changed.
        layers: the layers that it adapts.
    """
    layers = list(layers)
    for field in FIELDS:
        pattern = getattr(config, field) or {}
        keys = {layer: key_at(pattern, layer) for layer in layers}
        if any(pattern.get(key_at(sorted(pattern), layer)) != pattern.get(key) for layer, key in keys.items()):
            pattern = {layer: pattern[key] for layer, key in keys.items() if key is not None}
        setattr(config, field, pattern)


def _last_names(layers: Iterable[str]) -> str:
    return ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))

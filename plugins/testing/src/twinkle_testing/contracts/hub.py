"""Contract checks of hubs: repeatable data sets and models, and errors that name the reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_testing.contracts.case import Case, NotApplicable, require
from twinkle_testing.contracts.values import left_alone, same, shown

_UNKNOWN = "no-such-owner/no-such-name-at-all"


@dataclass(kw_only=True)
class HubCase(Case):
    """A hub and valid references.

    Attributes:
        scheme: scheme of its references, such as `hf`.
        model: the reference of a model.
        dataset: the reference of a data set.
        options: further keyword arguments of `load_dataset`.
    """

    kind = "hub"

    scheme: str = ""
    model: str = ""
    dataset: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def known(self, what: str) -> str:
        """Return the reference of a model or data set."""
        reference = str(getattr(self, what))
        if not reference:
            raise NotApplicable(f"its example names no {what}; give {what}='scheme://owner/name'")
        return reference

    def unknown(self) -> str:
        """Return a reference of an object that does not exist."""
        scheme = self.scheme or (self.model or self.dataset).partition("://")[0]
        if not scheme:
            raise NotApplicable("its example names no scheme")
        return f"{scheme}://{_UNKNOWN}"


def dataset_rows(case: HubCase) -> None:
    """A data set consists of rows, each a dict, the same each time it is loaded."""
    reference = case.known("dataset")
    first, second = (case.build().load_dataset(reference, **case.options) for _ in range(2))
    require(len(first) > 0, f"{reference} has no rows")
    for number in range(min(len(first), 3)):
        require(isinstance(first[number], Mapping), f"row {number} is {shown(first[number])}; it must be a dict")
    require(len(first) == len(second) and same(first[0], second[0]), "loaded again it has other rows")


def model_files(case: HubCase) -> None:
    """`download_model` returns an existing local folder or file, the same each time."""
    reference = case.known("model")
    first, second = (case.build().download_model(reference) for _ in range(2))
    require(
        isinstance(first, Path) and first.exists(), f"download_model() gave {shown(first)}; return an existing Path"
    )
    require(first == second, f"the second call gave {second} instead of {first}")


def unknown_reference(case: HubCase) -> None:
    """A missing object raises a TwinkleError that names it."""
    from twinkle.errors import TwinkleError

    hub, reference = case.build(), case.unknown()
    for what, call in (("load_dataset", hub.load_dataset), ("download_model", hub.download_model)):
        try:
            found = call(reference)
        except TwinkleError as error:
            require(_UNKNOWN.rpartition("/")[2] in str(error), f"{what}({reference!r}) says: {error}; it must name it")
        except Exception as error:  # any other exception
            require(
                False, f"{what}({reference!r}) raised {type(error).__name__}: {error}; raise an error of twinkle.errors"
            )
        else:
            require(False, f"{what}({reference!r}) gave {shown(found)}")


def unknown_keyword(case: HubCase) -> None:
    """An unknown keyword is an error that names it."""
    from twinkle.errors import TwinkleError

    hub, reference = case.build(), case.known("dataset")
    try:
        hub.load_dataset(reference, **{**case.options, "no_such_keyword": 1})
    except (TwinkleError, TypeError) as error:
        require("no_such_keyword" in str(error), f"no_such_keyword=1 raised: {error}; it must name the keyword")
        return
    require(False, "load_dataset(..., no_such_keyword=1) was accepted")


def options_left_alone(case: HubCase) -> None:
    """It does not change its options."""
    hub, reference = case.build(), case.known("dataset")
    left_alone(lambda options: hub.load_dataset(reference, **options), dict(case.options), "the options")


CASE = HubCase
CHECKS = (dataset_rows, model_files, unknown_reference, unknown_keyword, options_left_alone)

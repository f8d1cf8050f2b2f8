"""What requests may name: models, data sets and components of the service, by ids that are never paths."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from twinkle.errors import DataError, Unsupported
from twinkle.hub.local import default_hub
from twinkle_server.data.limits import DataLimits

_NAME: Final = r"[A-Za-z0-9][\w.-]{0,127}"
_ID: Final = re.compile(rf"{_NAME}(/{_NAME})?(@[\w.-]{{1,128}})?", re.ASCII)
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
BUILTIN: Final = "builtin"


@dataclass(frozen=True, slots=True)
class Rules:
    """What requests may name, and what a worker may use.

    Attributes:
        models: folder of the tokenizer by id of the model, without a scheme.
        sets: place of a data set by id, without a scheme.
        hubs: schemes of the hubs that may be used.
        rows: maximum number of rows of a data set.
        answer_bytes: maximum size of a result.
    """

    models: Mapping[str, str]
    sets: Mapping[str, str] = field(default_factory=dict)
    hubs: tuple[str, ...] = ()
    rows: int = 1_000_000
    answer_bytes: int = 32 * 2**20

    @classmethod
    def of(cls, limits: DataLimits, models: Mapping[str, str]) -> Self:
        """Return the rules of a service."""
        return cls(
            models={bare(name): folder for name, folder in models.items()},
            sets={bare(name): _expanded(place) for name, place in limits.sets.items()},
            hubs=limits.hubs,
            rows=limits.rows,
            answer_bytes=limits.answer_bytes,
        )

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes of all hubs that a worker reads: those that requests may use, and those of the operator's sets."""
        named = [_scheme(place) for place in self.sets.values()]
        return tuple(dict.fromkeys([*self.hubs, *(scheme for scheme in named if scheme and scheme != BUILTIN)]))

    def dump(self) -> str:
        """Serialize the rules for a process."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `dump`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "hubs": tuple(fields["hubs"])})

    def model(self, name: str) -> str:
        """Return the folder or the reference of a model's tokenizer.

        Raises:
            Unsupported: the service neither serves the model nor may use the hub.
        """
        if bare(name) in self.models:
            return self.models[bare(name)]
        reference = self._hub_reference(name)
        if reference is None:
            served = ", ".join(map(repr, self.models))
            raise Unsupported(f"model_id {name[:200]!r}: this service has the tokenizer of {served}; use that id")
        return reference

    def data_set(self, name: str) -> str:
        """Return the place of a data set that a request names.

        Raises:
            DataError: the service has no such data set.
        """
        if bare(name) in self.sets:
            return self.sets[bare(name)]
        if _scheme(name) == BUILTIN:
            return name
        reference = self._hub_reference(name)
        if reference is None:
            known = ", ".join([*map(repr, self.sets), "those of builtin://", *(f"{hub}://" for hub in self.hubs)])
            raise DataError(
                f"data set {name[:200]!r} cannot be loaded by this service, which has {known}; load it yourself and "
                "send its rows: DatasetMeta(data=rows)"
            )
        return reference

    def public(self, text: str) -> str:
        """Replace places of this machine in a text by the names that clients use."""
        for name, place in sorted({**self.models, **self.sets}.items(), key=lambda item: -len(item[1])):
            text = text.replace(place, name)
        return text

    def _hub_reference(self, name: str) -> str | None:
        """Return an id as a reference to a hub that may be used; None if it is something else."""
        scheme = _scheme(name) or default_hub()
        identifier = bare(name)
        return f"{scheme}://{identifier}" if scheme in self.hubs and _ID.fullmatch(identifier) else None


def bare(name: str) -> str:
    """Return an id without the scheme of its hub; other schemes stay."""
    scheme, separator, rest = name.partition("://")
    return rest if separator and scheme.lower() in ("hf", "ms") else name


def _expanded(place: str) -> str:
    """Return a place with the home folder in place of `~`, because the walls of a worker compare paths."""
    return str(Path(place).expanduser()) if place.startswith("~") else place


def _scheme(name: str) -> str | None:
    match = _SCHEME.match(name)
    return match[1].lower() if match else None

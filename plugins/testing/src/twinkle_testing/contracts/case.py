"""A component under test, with its example: how to build it, and its inputs."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from twinkle.errors import ArgumentError


class Violation(AssertionError):
    """The component breaks its contract; the message says how."""


class NotApplicable(Exception):
    """The check does not apply to this component; the message says why."""


def require(condition: Any, message: str) -> None:
    """Raise `Violation(message)` unless the condition holds."""
    if not condition:
        raise Violation(message)


@dataclass(kw_only=True)
class Case:
    """The example of a component. Each kind adds fields; their names are the keys of the example.

    Attributes:
        component: the class, function or instance.
        declared: the manifest's `inputs` of the component.
        folder: an empty folder for the files of the checks.
        kwargs: arguments of the constructor.
        skip: the reason to skip all checks (a text), or a mapping from names of checks to the reasons to skip them.
    """

    kind: ClassVar[str] = ""

    component: Any
    declared: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    skip: str | Mapping[str, str] = ""

    def build(self, **more: Any) -> Any:
        """Return a fresh component: a class is built, an instance is copied, a function is returned unchanged.

        Args:
            **more: further arguments of the constructor.
        """
        from twinkle._registry import registry

        if isinstance(self.component, type):
            return registry().build(self.component, self.kind, **{**self.kwargs, **more})
        return _copied(self.component)

    def unfit(self) -> str:
        """Return the reason why this component cannot be checked, or an empty text."""
        return self.skip if isinstance(self.skip, str) else ""

    @property
    def is_class(self) -> bool:
        """Whether the kit builds instances of the component."""
        return isinstance(self.component, type)

    @property
    def name(self) -> str:
        """Name of the component in messages."""
        return getattr(self.component, "__name__", type(self.component).__name__)


C = TypeVar("C", bound=Case)

_OWN = ("component", "declared", "folder")


def example_keys(case: type[Case]) -> list[str]:
    """Return the keys that an example of this kind may have."""
    return [f.name for f in fields(case) if f.init and f.name not in _OWN]


def check_example(case: type[Case], example: Mapping[str, Any], what: str) -> None:
    """Raise `ArgumentError` for an unknown key."""
    from twinkle_registry import nearest

    known = example_keys(case)
    for key in example:
        if key not in known:
            near = nearest(key, known, 1)
            hint = f", nearest: {near[0]!r}" if near else ""
            raise ArgumentError(f"the example of {what} has no {key!r}{hint}; it takes: {', '.join(known)}")


@contextlib.contextmanager
def refusal(action: str) -> Iterator[None]:
    """Pass if the block raises any `Exception`; otherwise raise `Violation`."""
    try:
        yield
    except (NotApplicable, Violation):
        raise
    except Exception:
        return
    raise Violation(f"{action} raised nothing")


def _copied(component: Any) -> Any:
    try:
        return copy.deepcopy(component)
    except Exception:  # the instance cannot be copied: all checks share it
        return component

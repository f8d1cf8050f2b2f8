"""Results that are plain values and also have the attribute `.result` of the published client."""

from typing import Any


class FloatResult(float):
    """A number."""

    @property
    def result(self) -> float:
        """The number itself."""
        return float(self)


class TextResult(str):
    """A text."""

    __slots__ = ()

    @property
    def result(self) -> str:
        """The text itself."""
        return str(self)


class DictResult(dict[str, Any]):
    """A mapping."""

    @property
    def result(self) -> dict[str, Any]:
        """The mapping itself."""
        return self


class NoResult:
    """What a call without a value returns: it is false, and its `.result` is None."""

    result = None

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NoResult()"


def result_of(value: Any) -> Any:
    """Return the value of a call in a form that has `.result`."""
    if isinstance(value, bool | int | float):
        return FloatResult(value)
    if isinstance(value, str):
        return TextResult(value)
    if isinstance(value, dict):
        return DictResult(value)
    return NoResult()

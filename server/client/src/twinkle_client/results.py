"""Results that are plain values and also have what published scripts use: `.result` and the dump of a model."""

from typing import Any

from twinkle.errors import ArgumentError


class _Result:
    """The attributes of a published result, a model with the one field `result`."""

    __slots__ = ()

    @property
    def result(self) -> Any:
        """The value."""
        return None

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        """Return `{"result": value}`.

        Args:
            mode: `python` keeps arrays; `json` has only what JSON has, so that arrays are lists.

        Raises:
            ArgumentError: the mode is unknown.
        """
        if mode not in ("python", "json"):
            raise ArgumentError(f"model_dump: mode must be 'python' or 'json', got {mode!r}")
        if mode == "json":
            return {"result": _plain(self.result)}
        return {"result": dict(self.result) if isinstance(self.result, dict) else self.result}

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """Return `{"result": value}` as JSON; arrays are lists.

        Args:
            indent: spaces of each level; None writes one line.
        """
        import json

        separators = (",", ":") if indent is None else None
        return json.dumps({"result": _plain(self.result)}, indent=indent, separators=separators, ensure_ascii=False)


class FloatResult(float, _Result):
    """A number."""

    @property
    def result(self) -> float:
        """The number itself."""
        return float(self)


class TextResult(str, _Result):
    """A text."""

    __slots__ = ()

    @property
    def result(self) -> str:
        """The text itself."""
        return str(self)


class DictResult(dict[str, Any], _Result):
    """A mapping."""

    @property
    def result(self) -> dict[str, Any]:
        """The mapping itself."""
        return self


class NoResult(_Result):
    """What a call without a value returns: it is false, and its `.result` is None."""

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


def _plain(value: Any) -> Any:
    """Return a value in which mappings are dicts and arrays are lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value

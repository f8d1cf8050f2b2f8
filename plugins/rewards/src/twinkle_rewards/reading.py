"""What a reward reads: the answer that a model has given, and the truth that belongs to the row."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Trajectory, user_data_get
from twinkle.errors import ArgumentError, DataError


def answer(trajectory: Trajectory) -> str:
    """Return the text of the last turn, with separate reasoning put in `<think>` tags before it.

    A conversation that does not end with the assistant has no answer: "".
    """
    messages = trajectory.get("messages") or []
    if not messages or messages[-1].get("role") != "assistant":
        return ""
    thought = messages[-1].get("reasoning_content")
    said = content(messages[-1])
    return f"<think>{thought}</think>{said}" if thought else said


def content(message: Mapping[str, Any]) -> str:
    """Return the text of a message; of a list of parts those that are text."""
    said = message.get("content")
    if isinstance(said, str):
        return said
    parts = said if isinstance(said, Sequence) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def truths(owner: object, trajectories: Sequence[Trajectory], given: Any, key: str) -> list[Any]:
    """Return the truth of each row.

    Args:
        owner: the reward, for errors.
        trajectories: the rows.
        given: `ground_truths` of the call: one entry a row, the truth itself or a trajectory that has it in `user_data`
            (or, without it there, as its last turn); None is `user_data` of the rows.
        key: the key in `user_data`.

    Raises:
        ArgumentError: `given` has not one entry a row.
        DataError: a row has no truth; names it.
    """
    name = type(owner).__name__
    if given is None:
        given = [{"user_data": row.get("user_data")} for row in trajectories]
    elif isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(trajectories):
        count = f"{len(given)} entries" if isinstance(given, Sequence) else repr(given)[:60]
        raise ArgumentError(f"{name}: ground_truths has {count}, there are {len(trajectories)} rows; give one a row")
    found = [_truth(one, key) for one in given]
    empty = (row for row, one in enumerate(found) if one is None or (isinstance(one, list | tuple) and not one))
    missing = next(empty, None)
    if missing is not None:
        raise DataError(
            f"{name}: row {missing} has no {key!r} in its user_data; let a preprocessor put the right answer "
            "there, or pass ground_truths="
        )
    return found


def truth_text(truth: Any) -> str:
    """Return a truth as text: JSON's true and false as JSON writes them."""
    return str(truth).lower() if isinstance(truth, bool) else str(truth)


def texts_of(truth: Any) -> list[str]:
    """Return the texts that are right: a truth that is a list has several."""
    return [truth_text(one) for one in (truth if isinstance(truth, list | tuple) else [truth])]


def key_name(owner: object, value: Any) -> str:
    """Return the option `ground_truth_key`.

    Raises:
        ArgumentError: it is no name.
    """
    if isinstance(value, str) and value:
        return value
    raise ArgumentError(f"{type(owner).__name__}: ground_truth_key is {value!r:.60}; it is a key of user_data")


def _truth(given: Any, key: str) -> Any:
    if not isinstance(given, Mapping):
        return given
    found = user_data_get(given.get("user_data"), key)
    if found is None and given.get("messages"):
        return answer(given)  # type: ignore[arg-type]
    stored = _stored(given.get("user_data") or (), key)
    if len(stored) > 1:
        return [_as_written(value, user_data_get({key: value}, key)) for value in stored]
    return _as_written(stored[0], found) if stored else found


def _as_written(stored: Any, decoded: Any) -> Any:
    """Return a number as the text that was stored: "1.50" and "1e5" are not 1.5 and 100000.0."""
    return stored if isinstance(stored, str) and isinstance(decoded, int | float) else decoded


def _stored(user_data: Any, key: str) -> list[Any]:
    """Return all values that `user_data` stores under a key."""
    if isinstance(user_data, Mapping):
        return [user_data[key]] if key in user_data else []
    pairs = [item for item in user_data if not isinstance(item, Mapping)]
    found = [item[key] for item in user_data if isinstance(item, Mapping) and key in item]
    return found + [value for name, value in pairs if name == key]

"""What the engine records about a training operation: its figures, and a sample of its rollouts.

A row is recorded whatever protocol it came from (`TrainedRow`). Figures are sums, so that those of several operations
can be added. Rollouts contain the tokens of a tenant; they leave the engine only in the message `ROLLOUTS`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from twinkle_server.wire.codec import Array

Floats = NDArray[np.float32]
NO_TARGET: Final = -100
_NAMES, _LENGTH = 16, 64
"""Maximum number of further metrics of an operation, and the length of their names."""
_BEFORE: Final = 4
"""A cut rollout begins a quarter of its length before the first sampled token."""


@dataclass(slots=True)
class TrainedRow:
    """A row of a forward-backward operation, with what is known about how it was sampled.

    Attributes:
        tokens: inputs of the model, `[N]` integers.
        labels: target of each position, `[N]` integers; `NO_TARGET` is none.
        trained: log-probability of each target in this operation, `[N]`.
        weights: weight of each position in the loss, `[N]`; None is 1 everywhere.
        sampled: log-probability of each target when it was sampled, `[N]`; None for rows that were not sampled.
        advantages: advantage of each position, `[N]`.
        mask: nonzero at sampled positions, `[N]`; None derives them: a log-probability or an advantage is not 0.
        reward: of the whole row.
    """

    tokens: Array
    labels: Array
    trained: Array
    weights: Array | None = None
    sampled: Array | None = None
    advantages: Array | None = None
    mask: Array | None = None
    reward: float | None = None

    def positions(self) -> NDArray[np.bool_]:
        """Return which positions were sampled, `[N]`."""
        if self.mask is not None:
            chosen = self.mask != 0
        elif self.sampled is None:
            chosen = np.zeros(len(self.labels), bool)
        else:
            chosen = self.sampled != 0
            if self.advantages is not None:
                chosen = chosen | (self.advantages != 0)
        return np.asarray(chosen & (self.labels != NO_TARGET), bool)

    def count(self) -> int:
        """Return the number of trained positions."""
        chosen = self.labels != NO_TARGET
        return int(np.count_nonzero(chosen if self.weights is None else chosen & (self.weights != 0)))


@dataclass(slots=True)
class Recorded:
    """What is kept of an operation.

    Attributes:
        figures: JSON text: `loss` (a sum), `tokens`, `rows`, and for sampled rows `kl` and `advantage` (sum and number
            of positions), `mismatch` (sum, number of positions, maximum of |trained - sampled|), `reward` (sum and
            number of rows); `metrics` holds further sums by name.
        rollouts: a description of each recorded row, in the order of `body`; see `Rollout`.
        body: arrays of the recorded rows; see `Rollout`.
    """

    figures: str
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    body: bytes = b""


@dataclass(slots=True)
class Rollout:
    """A part of a sampled row as it is stored: `tokens` `[n + 1]` int32, then three arrays `[n]` float32.

    Attributes:
        tokens: the first input token, and the n targets after it.
        sampled: log-probabilities when sampled; NaN at positions that were not sampled.
        trained: log-probabilities in the operation.
        advantages: 0 where there are none.
    """

    tokens: NDArray[np.int32]
    sampled: Floats
    trained: Floats
    advantages: Floats

    def dump(self) -> bytes:
        """Serialize the arrays."""
        floats = (self.sampled, self.trained, self.advantages)
        return self.tokens.astype("<i4").tobytes() + b"".join(array.astype("<f4").tobytes() for array in floats)

    @classmethod
    def parse(cls, data: bytes) -> "Rollout":
        """Parse the output of `dump`."""
        count = (len(data) - 4) // 16
        floats = np.frombuffer(data, "<f4", offset=4 * (count + 1)).reshape(3, count)
        return cls(np.frombuffer(data, "<i4", count + 1), *floats)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records operations.

    Args:
        rows: maximum number of rollouts of an operation; 0 records none.
        tokens: maximum number of tokens of a rollout.
    """

    rows: int = 4
    tokens: int = 1024

    def record(self, rows: Sequence[TrainedRow], loss: float, metrics: Mapping[str, float]) -> Recorded:
        """Return what is kept of an operation.

        Args:
            rows: of the operation.
            loss: sum over all rows.
            metrics: further sums, by name.
        """
        figures: dict[str, Any] = {"loss": loss, "tokens": sum(row.count() for row in rows), "rows": len(rows)}
        sampled = [(index, row, row.positions()) for index, row in enumerate(rows) if row.sampled is not None]
        if sampled:
            figures |= _figures_of_sampled([(row, chosen) for _, row, chosen in sampled])
        if rewards := [row.reward for row in rows if row.reward is not None]:
            figures["reward"] = [sum(rewards), len(rewards)]
        if further := _finite(metrics):
            figures["metrics"] = further
        record = Recorded(orjson.dumps(figures, option=orjson.OPT_SERIALIZE_NUMPY).decode())
        for index, row, chosen in _spread([entry for entry in sampled if entry[2].any()], self.rows):
            described, rollout = self._rollout(index, row, chosen)
            record.rollouts.append(described)
            record.body += rollout.dump()
        return record

    def _rollout(self, index: int, row: TrainedRow, chosen: NDArray[np.bool_]) -> tuple[dict[str, Any], Rollout]:
        sampled = np.asarray(row.sampled, np.float32)
        advantages = np.zeros(len(chosen), np.float32) if row.advantages is None else row.advantages
        first = int(np.argmax(chosen))
        start = min(max(0, first - self.tokens // _BEFORE), max(0, len(chosen) - self.tokens))
        part = slice(start, start + self.tokens)
        difference = np.abs(row.trained - sampled)[chosen]
        described = {
            "row": index,
            "n": len(chosen[part]),
            "skipped": start,
            "length": len(chosen),
            "positions": int(np.count_nonzero(chosen)),
            "reward": row.reward,
            "advantage": _number(np.asarray(advantages)[chosen].mean()),
            "mean": _number(difference.mean()),
            "largest": _number(difference.max()),
        }
        tokens = np.concatenate([row.tokens[start : start + 1], np.maximum(row.labels[part], 0)]).astype(np.int32)
        floats = np.where(chosen, sampled, np.float32(np.nan))[part], row.trained[part], np.asarray(advantages)[part]
        return described, Rollout(tokens, *(np.asarray(array, np.float32) for array in floats))


def _figures_of_sampled(rows: Sequence[tuple[TrainedRow, NDArray[np.bool_]]]) -> dict[str, Any]:
    signed = kl = advantage = largest = 0.0
    count = advantages = 0
    for row, chosen in rows:
        difference = np.asarray(row.sampled, np.float64)[chosen] - row.trained[chosen]
        if not difference.size:
            continue
        size = np.abs(difference)
        kl, signed, largest = kl + difference.sum(), signed + size.sum(), max(largest, float(size.max()))
        count += difference.size
        if row.advantages is not None:
            advantage += float(row.advantages[chosen].sum(dtype=np.float64))
            advantages += difference.size
    figures: dict[str, Any] = {}
    if count:
        figures = {"kl": [float(kl), count], "mismatch": [float(signed), count, largest]}
    if advantages:
        figures["advantage"] = [advantage, advantages]
    return {name: values for name, values in figures.items() if all(map(math.isfinite, values))}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    chosen = [(name[:_LENGTH], value) for name, value in metrics.items() if math.isfinite(value)]
    return dict(chosen[:_NAMES])


def _spread(entries: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` entries, evenly chosen."""
    if len(entries) <= count:
        return list(entries)
    return [entries[place * len(entries) // count] for place in range(count)]


def _number(value: Any) -> float | None:
    """Return a float, or None where JSON has none."""
    return float(value) if math.isfinite(value) else None

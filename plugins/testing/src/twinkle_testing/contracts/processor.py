"""Contract checks of processors: rows of any length become tensors of one shape, with all tokens in order."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle_testing.contracts.case import Case, NotApplicable, refusal, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import left_alone, same, shown

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = ("input_ids", "labels", "attention_mask", "position_ids", "completion_mask")


def _rows() -> list[dict[str, Any]]:
    rows = []
    for number, length in enumerate((3, 6, 1)):
        tokens = [10 * (number + 1) + place for place in range(length)]
        rows.append(
            {
                "input_ids": tokens,
                "labels": [*tokens[1:], -100],
                "loss_scale": [0.5] * length,
                "length": length,
                "user_data": [("row", str(number))],
            }
        )
    return rows


@dataclass(kw_only=True)
class ProcessorCase(Case):
    """A processor and the rows that it collates.

    Attributes:
        rows: encoded rows of different lengths.
    """

    kind = "processor"

    rows: Sequence[Mapping[str, Any]] = field(default_factory=_rows)

    def call(self, rows: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the batch of the rows."""
        given = self.rows if rows is None else rows
        found = self.build()(copy.deepcopy([dict(row) for row in given]))
        require(isinstance(found, Mapping), f"it returned {shown(found)}; return a mapping")
        return dict(found)

    def places(self, batch: Mapping[str, Any]) -> list["Tensor"]:
        """Return for each row the tokens of the batch that belong to it, as a mask `[B, T]` or `[1, sum]`."""
        import torch

        ids = batch["input_ids"]
        lengths = [len(row["input_ids"]) for row in self.rows]
        masks = []
        if "attention_mask" in batch:
            for number in range(len(lengths)):
                mask = torch.zeros_like(ids, dtype=torch.bool)
                mask[number] = batch["attention_mask"][number] != 0
                masks.append(mask)
            return masks
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        for start, length in zip(starts, lengths, strict=True):
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[0, start : start + length] = True
            masks.append(mask)
        return masks


def shapes(case: ProcessorCase) -> None:
    """It returns int64 `input_ids` `[B, T]`, masks or positions of that shape, and float32 `loss_scale`."""
    import torch

    batch = case.call()
    ids: Any = batch.get("input_ids")
    require(isinstance(ids, torch.Tensor) and ids.dim() == 2, f"input_ids is {shown(ids)}; it must be a tensor [B, T]")
    for key in (*_INTEGERS, "loss_scale"):
        if key not in batch or (key in ("labels", "completion_mask", "loss_scale") and key not in case.rows[0]):
            continue
        value, wanted = batch[key], torch.float32 if key == "loss_scale" else torch.int64
        require(
            isinstance(value, torch.Tensor) and value.shape == ids.shape,
            f"{key} is {shown(value)}; it must be as input_ids",
        )
        require(value.dtype == wanted, f"{key} is {value.dtype}; it must be {wanted}")
    require("attention_mask" in batch or "position_ids" in batch, "it has neither attention_mask nor position_ids")


def tokens_kept(case: ProcessorCase) -> None:
    """The batch contains all tokens, labels and weights of every row, in order."""
    batch = case.call()
    masks = case.places(batch)
    for key in ("input_ids", "labels", "loss_scale"):
        for number, (row, mask) in enumerate(zip(case.rows, masks, strict=True)):
            if key not in row:
                continue
            found, wanted = batch[key][mask].tolist(), list(row[key])
            require(found == wanted, f"{key} of row {number} became {shown(found)}; it is {shown(wanted)}")


def padding_trains_nothing(case: ProcessorCase) -> None:
    """Padding has the label -100 and the attention mask 0."""
    batch = case.call()
    if "attention_mask" not in batch:
        raise NotApplicable("it makes batches without padding")
    padded = batch["attention_mask"] == 0
    total = sum(len(row["input_ids"]) for row in case.rows)
    require(int((~padded).sum()) == total, f"attention_mask has {int((~padded).sum())} ones for {total} tokens")
    if "labels" in batch:
        labels = batch["labels"][padded].unique().tolist()
        require(labels in ([], [-100]), f"the labels of padding are {labels}; they must be -100")


def positions(case: ProcessorCase) -> None:
    """The positions of each row count from 0, wherever its padding is."""
    batch = case.call()
    if "position_ids" not in batch:
        raise NotApplicable("it makes no position_ids")
    for number, mask in enumerate(case.places(batch)):
        found = batch["position_ids"][mask].tolist()
        require(found == list(range(len(found))), f"the positions of row {number} are {found}")


def any_container(case: ProcessorCase) -> None:
    """Lists, NumPy arrays and tensors of tokens give the same batch, and one row alone is a batch of one."""
    import numpy as np
    import torch

    expected = case.call()
    for make in (np.asarray, torch.tensor):
        rows = [{k: make(v) if k in (*_INTEGERS, "loss_scale") else v for k, v in row.items()} for row in case.rows]
        found = case.call(rows)
        equal = all(same(found.get(key), expected[key]) for key in ("input_ids", "labels") if key in expected)
        require(equal, f"rows of {make.__module__}'s arrays give another batch than rows of lists")
    one = case.build()(copy.deepcopy(dict(case.rows[0])))
    require(
        same(one["input_ids"], case.call([case.rows[0]])["input_ids"]), "one row gives another batch than a list of it"
    )


def rides_along(case: ProcessorCase) -> None:
    """Values that are not numbers stay a list with one entry per row."""
    batch = case.call()
    keys = [
        key for key, value in case.rows[0].items() if isinstance(value, list) and value and not _is_number(value[0])
    ]
    for key in keys:
        entries = batch.get(key)
        inner = entries[0] if isinstance(entries, list) and len(entries) == 1 else entries
        kept = any(same(_lists(held), _lists([row[key] for row in case.rows])) for held in (entries, inner))
        require(kept, f"{key} became {shown(entries)}")


def rows_left_alone(case: ProcessorCase) -> None:
    """It does not change the rows."""
    processor = case.build()
    left_alone(processor, copy.deepcopy([dict(row) for row in case.rows]), "the rows")


def bad_rows_refused(case: ProcessorCase) -> None:
    """No rows, and rows whose labels and tokens differ in length, are errors."""
    processor = case.build()
    with refusal("an empty list of rows"):
        processor([])
    wrong = [{**row, "labels": [*row["labels"], 1]} for row in copy.deepcopy(list(case.rows))]
    with refusal("labels longer than the tokens"):
        processor(wrong)


def pickle(case: ProcessorCase) -> None:
    """It can be pickled, for worker processes of a data loader."""
    copied = pickled(case.build())
    found = copied(copy.deepcopy([dict(row) for row in case.rows]))
    require(same(found["input_ids"], case.call()["input_ids"]), "after pickling it gives another batch")


CASE = ProcessorCase
CHECKS = (
    shapes,
    tokens_kept,
    padding_trains_nothing,
    positions,
    any_container,
    rides_along,
    rows_left_alone,
    bad_rows_refused,
    pickle,
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value

"""The processor: encoded rows to a batch of tensors, and batches to micro-batches."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from twinkle._arguments import refuse_unknown
from twinkle.data_format import InputFeature
from twinkle.errors import ArgumentError, Unsupported
from twinkle.processor.collate import join, pad_tokens, per_token
from twinkle.processor.rows import TOKEN_KEYS, Row, as_rows
from twinkle.runtime import remote_class

if TYPE_CHECKING:
    import torch

    from twinkle.mesh import DeviceMesh


@remote_class()
class InputProcessor:
    """Pads encoded rows to one batch of tensors on the CPU; the model moves it to its device.

    Anything callable as `processor(inputs) -> batch` may stand in for it.
    """

    def __init__(
        self,
        device_mesh: "DeviceMesh | None" = None,
        padding_free: bool = False,
        framework: Literal["transformers", "megatron"] = "transformers",
        *,
        padding_side: Literal["left", "right"] = "right",
        pad_to_multiple_of: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember how to pad.

        Args:
            device_mesh: where the batch will be used; padding does not depend on it.
            padding_free: rows one after the other without padding; not offered yet.
            framework: `transformers`; `megatron` is not offered yet.
            padding_side: where shorter rows are filled up.
            pad_to_multiple_of: round the width of the batch up to a multiple of this.
            **kwargs: none; an unknown name is an error.

        Raises:
            ArgumentError: an argument is unknown or outside its range.
            Unsupported: `padding_free=True` or `framework="megatron"`.
        """
        what = type(self).__name__
        refuse_unknown(InputProcessor.__init__, kwargs, what=what)
        if padding_free:
            raise Unsupported(f"{what}(padding_free=True) is planned for the next release; leave it out to pad rows")
        if framework == "megatron":
            raise Unsupported(f"{what}(framework='megatron') is planned for the next release; use 'transformers'")
        if framework != "transformers":
            raise ArgumentError(f"{what}: framework is {framework!r}; it is 'transformers' or 'megatron'")
        if padding_side not in ("left", "right"):
            raise ArgumentError(f"{what}: padding_side is {padding_side!r}; it is 'left' or 'right'")
        self.device_mesh = device_mesh
        self.padding_free = padding_free
        self.framework = framework
        self.padding_side: Literal["left", "right"] = padding_side
        self.pad_to_multiple_of = _at_least_one("pad_to_multiple_of", pad_to_multiple_of, what)

    def __call__(self, inputs: Any, *, device: "torch.device | str | None" = None, **kwargs: Any) -> InputFeature:
        """Collate rows to one batch.

        Args:
            inputs: one row, a list of rows, or a batch collated before; values are lists, NumPy arrays or tensors.
            device: move the tensors there.
            **kwargs: none; an unknown name is an error.

        Returns:
            int64 `[B, T]`: `input_ids`, `attention_mask`, `position_ids` (the last two are made where rows lack them),
            and `labels` and `completion_mask` where rows have them; float32 `[B, T]`: `loss_scale`. Padding is 0, and
            -100 in `labels`. Other keys with one number a token are padded with 0 likewise; numbers become `[B]`,
            arrays of one shape `[B, ...]`; everything else (`messages`, `user_data`, ragged values) stays a list.

        Raises:
            DataError: rows are empty, not encoded, of different keys, or of unequal lengths; names row and key.
        """
        refuse_unknown(InputProcessor.__call__, kwargs, what=type(self).__name__)
        return self._collate(as_rows(inputs), width=0, device=device)

    def split_rows(self, inputs: Any, micro_batch_size: int | None = None) -> list[list[Row]]:
        """Cut rows into consecutive micro-batches of at most `micro_batch_size` rows; None keeps them together.

        Raises:
            ArgumentError: `micro_batch_size` is below 1.
            DataError: as in a call.
        """
        rows = as_rows(inputs)
        size = _at_least_one("micro_batch_size", micro_batch_size, type(self).__name__) or len(rows)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def collate_fn(
        self,
        inputs: Any,
        micro_batch_size: int | None = None,
        variable_seq_lengths: bool = False,
        *,
        device: "torch.device | str | None" = None,
        **kwargs: Any,
    ) -> list[InputFeature]:
        """Return the micro-batches of `split_rows`, each collated.

        Args:
            inputs: as in a call.
            micro_batch_size: rows in each; None is all.
            variable_seq_lengths: True pads each micro-batch to its own longest row, False all to the longest of all.
            device: move the tensors there.
            **kwargs: none; an unknown name is an error.
        """
        refuse_unknown(InputProcessor.collate_fn, kwargs, what=f"{type(self).__name__}.collate_fn")
        parts = self.split_rows(inputs, micro_batch_size)
        width = 0 if variable_seq_lengths else max(len(row["input_ids"]) for part in parts for row in part)
        return [self._collate(part, width, device) for part in parts]

    def _collate(self, rows: Sequence[Row], width: int, device: "torch.device | str | None") -> InputFeature:
        lengths = [len(row["input_ids"]) for row in rows]
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(width, *lengths) // multiple) * multiple
        columns = _columns(rows, lengths)
        batch: Any = {}
        for key, values in columns.items():
            if key in TOKEN_KEYS or per_token(values, lengths):
                batch[key] = pad_tokens(key, values, width, self.padding_side)
            else:
                batch[key] = join(values)
        moved: Any = batch if device is None else _moved(batch, device)
        return moved  # type: ignore[no-any-return]


_MADE: dict[str, Callable[[int], list[int]]] = {
    "attention_mask": lambda length: [1] * length,
    "position_ids": lambda length: list(range(length)),
}


def _columns(rows: Sequence[Row], lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Return the rows as columns, without those that are None in every row, and with masks and positions made."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    columns = {key: values for key, values in columns.items() if any(value is not None for value in values)}
    for key, make in _MADE.items():
        columns.setdefault(key, [make(length) for length in lengths])
    return columns


def _moved(batch: dict[str, Any], device: "torch.device | str") -> dict[str, Any]:
    return {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}


def _at_least_one(name: str, value: int | None, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{what}: {name} is {value!r}; it is a whole number from 1, or None")
    return value

"""The processor: collates encoded rows to a batch of tensors, and splits batches into micro-batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from twinkle._arguments import refuse_unknown
from twinkle.data_format import InputBatch, InputFeature, ModelOutput
from twinkle.errors import ArgumentError, Unsupported
from twinkle.runtime import remote_class
from twinkle_torch.collate import (
    TOKEN_KEYS,
    Layout,
    Row,
    as_rows,
    join,
    join_labels,
    mask_and_positions,
    of_whole_row,
    pack,
    pad_tokens,
    per_token,
    unpack,
    unpack_outputs,
)

if TYPE_CHECKING:
    import torch

    from twinkle.mesh import DeviceMesh


@remote_class()
class InputProcessor:
    """Collates encoded rows to one batch of tensors on the CPU, with padding or without; the model moves it.

    Any callable `processor(inputs) -> batch` can be used instead.
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
        """Store the padding options.

        Args:
            device_mesh: where the batch will be used; padding does not depend on it.
            padding_free: rows one after the other in one row, without padding.
            framework: `transformers`; `megatron` is not offered yet.
            padding_side: where shorter rows are filled up (and sequences, when a batch is unpacked).
            pad_to_multiple_of: round the width of the batch up to a multiple of this; only with padding.
            **kwargs: none; an unknown name is an error.

        Raises:
            ArgumentError: an argument is unknown or outside its range.
            Unsupported: `framework="megatron"`.
        """
        what = type(self).__name__
        refuse_unknown(InputProcessor.__init__, kwargs, what=what)
        if not isinstance(padding_free, bool):
            raise ArgumentError(f"{what}: padding_free is {padding_free!r}; it is True or False")
        if padding_free and pad_to_multiple_of is not None:
            raise ArgumentError(f"{what}: pad_to_multiple_of has no effect with padding_free=True; give one of them")
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

            Several targets a token, `labels` `[T, K]` (and `loss_scale` of that shape), become `[B, T, K]` with the
            largest K of the rows.

            `labels` may also belong to the whole row: one number (`[B]`), or a list of fractions of another length than
            the tokens' (`[B, K]`); fractions as many as the tokens are targets of a value head, padded with -100.

            With `padding_free=True`, and where a row is packed (its `position_ids` begin at 0 more than once), the
            batch is one row: `[1, sum of lengths]` without `attention_mask`, and other keys are `[1, sequences]` or
            `[[...]]`, one entry a sequence. In a packed row such a key holds a list with an entry for each sequence.

        Raises:
            DataError: rows are empty, not encoded, of different keys, or of unequal lengths; names row and key.
        """
        refuse_unknown(InputProcessor.__call__, kwargs, what=type(self).__name__)
        return self._collate(as_rows(inputs), width=0, device=device)

    def split_rows(self, inputs: Any, micro_batch_size: int | None = None) -> list[list[Row]]:
        """Split rows into consecutive micro-batches of at most `micro_batch_size` rows; None keeps them together.

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

    def unpack_packed_sequences(
        self, inputs: InputBatch, outputs: ModelOutput | None = None, task: str = "causal_lm"
    ) -> tuple[InputBatch, ModelOutput | None]:
        """Return a batch, and a model's outputs for it, with one padded row for each sequence.

        Args:
            inputs: a batch without padding, or with packed rows: `[B, T]`.
            outputs: tensors `[B, T, ...]` are unpacked, everything else stays. Gradients flow through.
            task: "causal_lm".

        Returns:
            inputs `[sequences, longest]` with an `attention_mask`, and outputs likewise (None if there were none).

        Raises:
            Unsupported: another task.
        """
        if task != "causal_lm":
            raise Unsupported(f"{type(self).__name__}.unpack_packed_sequences: task is {task!r}; it is 'causal_lm'")
        layout = Layout.of(inputs)
        unpacked: Any = unpack(inputs, layout, self.padding_side)
        if outputs is None:
            return unpacked, None
        padded_outputs: Any = unpack_outputs(outputs, layout, inputs["input_ids"].shape[:2], self.padding_side)
        return unpacked, padded_outputs

    def unpack_inputs(self, inputs: InputBatch, task: str = "causal_lm") -> InputBatch:
        """Return the inputs of `unpack_packed_sequences`."""
        unpacked: InputBatch = self.unpack_packed_sequences(inputs, task=task)[0]
        return unpacked

    def add_extra_padding_free_args(self, inputs: InputBatch) -> InputBatch:
        """Add the arguments for flash-attention kernels of transformers, to call a Hugging Face model directly.

        Args:
            inputs: a batch without padding, `[1, T]`.

        Returns:
            the batch with `cu_seq_lens_q` and `cu_seq_lens_k` (int32 `[sequences + 1]`: where each begins, and the
            end) and `max_length_q` and `max_length_k` (the longest).

        Raises:
            ArgumentError: the batch has padding.
        """
        from twinkle_torch.segments import Segments

        if inputs["input_ids"].shape[0] != 1 or "attention_mask" in inputs:
            raise ArgumentError(f"{type(self).__name__}.add_extra_padding_free_args: the batch is not without padding")
        segments = Segments.of(Layout.of(inputs).lengths)
        longest, bounds = segments.longest, segments.cu_seqlens
        extra = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        added: InputBatch = {**inputs, **extra}  # type: ignore[typeddict-item]
        return added

    def _collate(self, rows: Sequence[Row], width: int, device: "torch.device | str | None") -> InputFeature:
        lengths = [len(row["input_ids"]) for row in rows]
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(width, *lengths) // multiple) * multiple
        batch: Any = {}
        for key, values in _columns(rows).items():
            if key == "labels" and any(map(of_whole_row, values, lengths)):
                batch[key] = join_labels(values)
            elif key in TOKEN_KEYS or per_token(values, lengths):
                batch[key] = pad_tokens(key, values, width, self.padding_side)
            else:
                batch[key] = join(values)
        prepared = batch.keys() & _MADE  # without them, each row is a single sequence
        if len(prepared) < len(_MADE):
            derived = zip(_MADE, mask_and_positions(lengths, width, self.padding_side), strict=True)
            batch |= {key: value for key, value in derived if key not in prepared}
        if self.padding_free or (prepared and Layout.of(batch).packed):
            batch = pack(batch)
        moved: Any = batch if device is None else _moved(batch, device)
        return moved  # type: ignore[no-any-return]


_MADE = ("attention_mask", "position_ids")


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the rows as columns, without those that are None in every row."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: values for key, values in columns.items() if any(value is not None for value in values)}


def _moved(batch: dict[str, Any], device: "torch.device | str") -> dict[str, Any]:
    return {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}


def _at_least_one(name: str, value: int | None, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{what}: {name} is {value!r}; it is a whole number from 1, or None")
    return value

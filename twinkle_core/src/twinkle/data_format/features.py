"""Encoded rows: the output of a template and the input of a model."""

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch

IGNORE_INDEX = -100
"""The label of positions that are not trained."""
InputType: TypeAlias = "list[list[int]] | list[int] | np.ndarray | torch.Tensor"


class InputFeature(TypedDict, total=False):
    """One encoded row. Collated rows are an `InputBatch` of the same keys.

    `labels[i]` is the target of position `i`: labels are stored already shifted, -100 is not trained, and the last
    position of a row is always -100. Multimodal inputs have the names that their processor gives them; `messages` and
    `user_data` of the trajectory are kept unchanged.
    """

    input_ids: InputType
    """int64 `[T]`: token ids."""
    attention_mask: InputType
    """int64 `[T]`: 1 where a token is real."""
    position_ids: InputType
    """int64 `[T]`: positions; they restart at 0 where packed sub-sequences begin."""
    labels: InputType
    """int64 `[T]`: the next token where it is trained, else -100; `[T, K]` for several targets a position."""
    completion_mask: InputType
    """int64 `[T]`: 1 at positions whose target was sampled."""
    loss_scale: Any
    """float32, in the shape of `labels`: weight of each position's loss."""
    routed_experts: Any
    length: int
    """Number of real tokens."""
    messages: list[Any]
    user_data: list[Any]


class InputBatch(TypedDict, total=False):
    """Collated rows: the output of a processor and the input of models, losses and metrics. Shorter rows are padded.

    Other keys of the rows are kept: tensors are stacked, other values become a list.
    """

    input_ids: "torch.Tensor"
    """int64 `[B, T]`."""
    attention_mask: "torch.Tensor"
    """int64 `[B, T]`: 0 at padding."""
    position_ids: "torch.Tensor"
    """int64 `[B, T]`."""
    labels: "torch.Tensor"
    """int64 `[B, T]`: the next token where it is trained, else -100; `[B, T, K]` for several targets a position."""
    completion_mask: "torch.Tensor"
    """int64 `[B, T]`."""
    loss_scale: "torch.Tensor"
    """float32, in the shape of `labels`."""

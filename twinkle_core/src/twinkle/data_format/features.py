"""Encoded rows: what a template makes and a model trains on."""

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch

InputType: TypeAlias = "list[list[int]] | list[int] | np.ndarray | torch.Tensor"


class InputFeature(TypedDict, total=False):
    """One encoded row, or a collated batch of rows (then every sequence is `[B, T]`).

    `labels[i]` is the target of position `i`: labels are stored already shifted, -100 is not trained, and the last
    position of a row is always -100. Multimodal inputs travel under their processor's own names; `messages` and
    `user_data` of the trajectory ride along untouched.
    """

    input_ids: InputType
    """int64 `[T]`: token ids."""
    attention_mask: InputType
    """int64 `[T]`: 1 where a token is real."""
    position_ids: InputType
    """int64 `[T]`: positions; they restart at 0 where packed sub-sequences begin."""
    labels: InputType
    """int64 `[T]`: the next token where it is trained, else -100."""
    completion_mask: InputType
    """int64 `[T]`: 1 at positions whose target was sampled."""
    loss_scale: Any
    """float32 `[T]`: weight of each position's loss."""
    routed_experts: Any
    length: int
    """Number of real tokens."""
    messages: list[Any]
    user_data: list[Any]

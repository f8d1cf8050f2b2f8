"""What a forward does with the experts that the routers of a mixture model choose."""

from enum import StrEnum

__all__ = ["RouterReplayAction"]


class RouterReplayAction(StrEnum):
    """Values of `router_replay_action`, the argument of `forward`, `forward_only` and `forward_backward`.

    Members compare equal to their strings, so that `"record"` and `RouterReplayAction.RECORD` mean the same.
    """

    DISABLED = "disabled"
    """Routers choose by themselves, and nothing is recorded; so does None."""
    RECORD = "record"
    """Routers choose by themselves; the output `routed_experts` has their choices."""
    REPLAY_FORWARD = "replay_forward"
    """Rows with `routed_experts` use these experts; routers choose for rows without them."""
    REPLAY_BACKWARD = "replay_backward"
    """Published for recomputed activations, which always use the experts of their forward; no call takes it."""

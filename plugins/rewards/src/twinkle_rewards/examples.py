"""What the contract kit calls rewards and advantages with."""

from typing import Any

REINFORCE = {"scales": ["batch", "none"]}
_TOKENS = (3, 1, 2, 4, 2, 5, 1, 3)
GAE: dict[str, Any] = {
    "scales": ["batch", "none"],
    "tokens": _TOKENS,
    "row_arguments": {"values": [[0.25 * place - 0.5 for place in range(count)] for count in _TOKENS]},
    "skip": {"better_is_higher": "a row is compared with its own values, not with its group"},
}

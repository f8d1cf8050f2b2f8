"""The loss scale of float16: it prevents small gradients from underflowing, and shrinks after overflows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, CheckpointError
from twinkle_registry import check_keywords

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-14
"""float16's smallest normal number: gradients that overflow even at this scale are not finite without it."""
_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class LossScaler:
    """The scale of `torch.amp.GradScaler` as a plain number, which is read without synchronizing the device.

    The loop multiplies losses by it, divides gradients by `factor` together with their denominator, and reports
    whether their norm was finite. The scale changes only in `update`, so it is constant within a step.

    Args:
        init_scale: scale at the start.
        growth_factor: factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: factor of the scale after a step with overflow.
        growth_interval: steps without overflow until it grows.
        enabled: False disables scaling.

    Raises:
        ArgumentError: a value is invalid.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        _check("init_scale", init_scale, 0.0 < init_scale <= _LARGEST, "above 0")
        _check("growth_factor", growth_factor, 1.0 < growth_factor <= _LARGEST, "above 1")
        _check("backoff_factor", backoff_factor, 0.0 < backoff_factor < 1.0, "between 0 and 1")
        _check("growth_interval", growth_interval, growth_interval >= 1, "at least 1")
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.enabled = int(growth_interval), bool(enabled)
        self._scale, self._good_steps, self._exhausted = float(init_scale), 0, False

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> "LossScaler":
        """Build one from `grad_scaler_config`; an unknown name is an error."""
        options = dict(config or {})
        check_keywords(cls, options, what="grad_scaler_config")
        return cls(**options)

    @property
    def factor(self) -> float:
        """Divisor of the pending gradients."""
        return self._scale if self.enabled else 1.0

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum: gradients that are not finite would not be so without it either."""
        return self._exhausted or not self.enabled

    def scale(self, loss_sum: Tensor) -> Tensor:
        """Return the loss to call `backward` on, in at least float32."""
        if not self.enabled:
            return loss_sum
        return loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32)) * self._scale

    def update(self, overflow: bool) -> None:
        """Update after one step: lower the scale after an overflow, raise it after enough steps without one.

        Args:
            overflow: whether a gradient of the step was not finite, so that the step was skipped.
        """
        if not self.enabled:
            return
        self._exhausted = overflow and self._scale <= _SMALLEST
        if overflow:
            lower = max(min(self._scale, _SMALLEST), self._scale * self.backoff_factor)
            self._scale, self._good_steps = lower, 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._good_steps = 0
            if self._scale * self.growth_factor <= _LARGEST:
                self._scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers under the names of `torch.amp.GradScaler`; empty if it is not enabled."""
        if not self.enabled:
            return {}
        values = (self._scale, self.growth_factor, self.backoff_factor, self.growth_interval, self._good_steps)
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            CheckpointError: a value is missing, or the state is of a scaler that was not enabled.
        """
        if not self.enabled:
            return
        if missing := [name for name in _STATE if name not in state]:
            raise CheckpointError(
                f"the state of a loss scaler lacks {missing[0]!r}; it was saved without float16, or is damaged"
            )
        self._scale, self._good_steps, self._exhausted = float(state["scale"]), int(state["_growth_tracker"]), False
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])


def _check(name: str, value: float, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ArgumentError(f"grad_scaler_config: {name} must be a number {wanted}, got {value!r}")

"""Detects patches and kernels that were applied to a model, or undone on it, by any code."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from twinkle._registry import registry


class PatchWatch:
    """Detects changes of the patches of a model.

    It includes patches of modules around and inside the model, and of classes and Python modules, which may affect any
    model.

    Args:
        model: the Hugging Face module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._record_version: Callable[[], int] = _exported("record_version") or (lambda: 0)
        self._applications: Callable[[], list[Any]] = _exported("applications") or (lambda: [])
        self._version, self._known = self._record_version(), self._applied()

    def changed(self) -> bool:
        """Return whether a patch was applied or undone since the last call; cheap if none was in this process."""
        if (version := self._record_version()) == self._version:
            return False
        before, self._version, self._known = self._known, version, self._applied()
        return before != self._known

    def forget(self) -> None:
        """Make the next call return True, because the last change could not be handled."""
        self._version, self._known = -1, [None]

    def _applied(self) -> list[Any]:
        inside = {id(module) for module in self._model.modules()}
        return [a for a in self._applications() if self._concerns(a.target(), inside)]

    def _concerns(self, target: Any, inside: set[int]) -> bool:
        if not isinstance(target, nn.Module):
            return isinstance(target, type | ModuleType)
        return id(target) in inside or any(module is self._model for module in target.modules())


def _exported(name: str) -> Any:
    """Return a function of the plugin for patches; None if it is not installed, so that nothing can be patched."""
    if name not in registry().exports("twinkle.patch"):
        return None
    return registry().export("twinkle.patch", name)

"""Modules that are imported when they are first used: every worker of the test run collects every file."""

import importlib
from typing import Any


class Deferred:
    """Stands for a module in the code of tests.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)

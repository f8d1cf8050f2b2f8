"""An environment whose steps can be held up."""

import threading
from collections.abc import Mapping
from typing import Any

from twinkle.env import StepResult
from twinkle_agentic.examples import CountdownEnv


class WaitingEnv(CountdownEnv):
    """A world with two actions, one of which hangs until it is let go."""

    def __init__(self) -> None:
        super().__init__(4)
        self.go = threading.Event()

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        if tool_name == "wait":
            self.go.wait(30)
            return StepResult("waited")
        return super().step(tool_name, arguments)

    def tools(self) -> list[Any]:
        wait = {"name": "wait", "description": "Waits.", "parameters": {"type": "object", "properties": {}}}
        return [*super().tools(), {"type": "function", "function": wait}]

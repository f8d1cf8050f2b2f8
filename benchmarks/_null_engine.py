"""An engine that computes nothing and remembers nothing but the number of passes since the last step.

Every log-probability is 0. The ledger of the tests hashes every row, which takes a millisecond for 32,768 tokens, and
keeps 40 bytes of each.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from ledger_engine import LedgerEngine  # found by the path above

from twinkle.engine import AdapterRef, Operation, OperationError, OperationResult, Step, StepResult, Usage
from twinkle_server.engine.executor import Executor


class NullEngine(LedgerEngine):
    """See the module."""

    def _run(self, place: int, operation: Operation, number: int) -> OperationResult | OperationError:
        assert isinstance(operation.adapter, AdapterRef)
        if operation.kind == "forward_backward":
            self._ledgers[operation.adapter].pending.append(0)
        outputs = [{"logps": np.zeros(len(row["labels"]), np.float32)} for row in operation.rows]
        usage = Usage(sum(len(row["input_ids"]) for row in operation.rows))
        return OperationResult(outputs, 0.0, 1.0, {}, usage, [{"pass": number}])  # type: ignore[arg-type]

    def _step(self, step: Step) -> StepResult:
        assert isinstance(step.adapter, AdapterRef)
        ledger = self._ledgers[step.adapter]
        count, ledger.pending = len(ledger.pending), []
        return StepResult(float(count))


class Unrecorded(NullEngine):
    """The same, in a process whose executor records nothing (`recording_cost.py`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Executor._record = lambda self, *rest: None  # type: ignore[method-assign]

"""The reference of native models: what each call changes, and what it returns."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service_simulation.reference import Event, State

KINDS = frozenset(
    {"pass", "only", "graph", "score", "backward", "due step", "measure", "weights", "metric", "scheduler"}
)
"""Kinds of native calls."""
UNFIT = "TrainingStateError"


def applied(state: "State", event: "Event") -> "State":
    """Return the state after a call, or after an operation of another kind on a native model."""
    kind, rows = event.kind, event.rows
    if kind == "pass":
        return replace(trained(state, rows), training=True, graph=None, scored=False)
    if kind == "only":
        return replace(state, staged=rows, training=False)
    if kind == "graph":
        return replace(state, graph=rows, scored=False, training=True)
    if kind == "score" and state.training:
        return replace(state, scored=state.graph is not None)
    if kind == "score":
        return replace(state, evaluated=(*state.evaluated, *(state.staged or ())))
    if kind == "backward" and state.graph is not None and state.scored:
        return replace(trained(state, state.graph), graph=None, scored=False)
    if kind == "due step" and state.calls and state.calls >= state.accumulation:
        return replace(state, applied=(*state.applied, *state.pending), pending=(), calls=0, steps=state.steps + 1)
    if kind == "measure":
        return replace(state, seen=()) if event.options else replace(state, evaluated=())
    if kind == "metric":
        return replace(state, metrics=state.metrics + 1)
    if kind == "scheduler":
        return replace(state, scheduler=event.options)
    if kind == "create":
        return replace(state, accumulation=event.options)
    if kind == "load" and event.source is not None:
        return _loaded(state, event.source.state(), event.optimizer)
    return state


def trained(state: "State", rows: tuple[int, ...]) -> "State":
    """Return the state after a backward call."""
    return replace(
        state, pending=(*state.pending, *rows), seen=(*state.seen, *rows), cur_step=state.cur_step + 1,
        calls=state.calls + 1,
    )  # fmt: skip


def _loaded(state: "State", saved: "State", optimizer: bool) -> "State":
    """A checkpoint has neither gradients nor what metrics have seen of them; components are those of the model."""
    if not optimizer:
        return replace(state, applied=saved.applied, pending=(), calls=0)
    return replace(
        state, applied=saved.applied, pending=(), calls=0, steps=saved.steps, cur_step=saved.cur_step, seen=(),
        evaluated=saved.evaluated, accumulation=saved.accumulation,
    )  # fmt: skip


def check(event: "Event", before: "State", where: str) -> None:
    """Compare what a call returned with what it must return."""
    from service_simulation.reference import demand

    wanted = returned(event, before)
    demand(wanted is None or event.value == wanted, f"{where} returned {event.value}, not {wanted}; it was {before}")


def returned(event: "Event", before: "State") -> Any:
    """Return the value of a call, or the name of the error that it raises; None if it has none that can be checked."""
    if event.kind == "score":
        rows = before.graph if before.training else before.staged
        return UNFIT if rows is None else float(sum(number >> 32 for number in rows))
    if event.kind == "backward":
        return None if before.graph is not None and before.scored else UNFIT
    if event.kind == "due step":
        due = before.calls >= before.accumulation
        return (float(len(before.pending)) if due else 0.0) if before.calls else UNFIT
    if event.kind == "measure":
        rows = {
            "applied": before.applied,
            "pending": before.pending,
            "seen": before.seen,
            "evaluated": before.evaluated,
        }
        counters = {"steps": before.steps, "cur_step": before.cur_step, "calls": before.calls}
        return {**rows, **counters, "components": digest(before)}
    if event.kind == "weights":
        return {"applied": before.applied, "pending": before.pending}
    return None


def digest(state: "State") -> int:
    """Return the ledger's digest of the components of a model."""
    components: dict[str, Any] = {"optimizer": ["AdamW", {}]}
    if state.metrics:
        components["metrics"] = [["DPOMetric", None, {}]] * state.metrics
    if state.scheduler is not None:
        options = {"num_warmup_steps": 1, "num_training_steps": state.scheduler}
        components["scheduler"] = ["CosineWarmupScheduler", options]
    return zlib.crc32(json.dumps(components, sort_keys=True).encode())


def measured(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the rows and counters that the ledger reports as metrics."""
    found: dict[str, Any] = {}
    for name in ("applied", "pending", "seen", "evaluated"):
        halves = [
            (metrics[f"{name}.{at}.token"], metrics[f"{name}.{at}.hash"]) for at in range(int(metrics[f"{name}.count"]))
        ]
        found[name] = tuple(int(token) << 32 | int(rest) for token, rest in halves)
    return found | {name: int(metrics[name]) for name in ("steps", "cur_step", "calls", "components")}

"""Names of models: the base model, and the models and checkpoints of the caller."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_server.app_state import AppState, Caller, now
from twinkle_server.chat.errors import InvalidParameter, ModelNotFound
from twinkle_server.errors import BadRequest, Gone, NotFound
from twinkle_server.ids import CheckpointPath
from twinkle_server.requests import check_sampled, isoformat
from twinkle_server.store.records import Checkpoint, Model

LATEST = "latest"
_SAMPLED = ("sampler_weights", "weights")
"""Kinds of checkpoints that can be sampled, the preferred one first."""
_LISTED = 1000
_SCHEMES = ("tinker://", "twinkle://")


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that a request uses.

    Attributes:
        source: folder of a checkpoint, relative to the data folder.
        model: id of the model whose present weights are used; without both, it is the base model.
        record: of the model or checkpoint; None for the base model.
    """

    source: str | None = None
    model: str | None = None
    record: Model | Checkpoint | None = field(default=None, compare=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Target":
        """Return the weights of a checkpoint."""
        return cls(checkpoint.folder, record=checkpoint)


async def resolve(state: AppState, caller: Caller, name: str) -> Target:
    """Return the weights of a name.

    Names are the name of the base model; `<run>` or `<run>/latest`, the newest weights of a run; `<run>/<checkpoint>`;
    and paths of checkpoints, `tinker://<run>/<kind>/<checkpoint>`.

    Raises:
        ModelNotFound: the caller has no such model.
        BadRequest: it has all weights of a model.
    """
    if name == state.service.info.name:
        return Target()
    target = await _target(state, caller, name)
    if target.record is not None:
        check_sampled(target.record, name)
    return target


async def _target(state: AppState, caller: Caller, name: str) -> Target:
    try:
        if name.startswith(_SCHEMES):
            path = CheckpointPath.parse("tinker://" + name.partition("://")[2])
            return Target.of(await _checkpoint(state, caller, path))
        run, _, checkpoint = name.partition("/")
        if not checkpoint or checkpoint == LATEST:
            return await _newest(state, caller, run)
        return Target.of(await _named(state, caller, run, checkpoint))
    except Gone as error:
        raise ModelNotFound(str(error)) from error
    except (NotFound, BadRequest) as error:
        raise ModelNotFound(
            f"the model {name[:300]!r} does not exist; GET /v1/models lists the base model, "
            f"{state.service.info.name!r}, and your own"
        ) from error


async def _newest(state: AppState, caller: Caller, run: str) -> Target:
    model = await state.store.models.get(caller.tenant, run)
    state.check_base(model.base, f"the model {run!r}")
    if model.status not in ("gone", "corrupted"):
        return Target(model=run, record=model)
    latest = await state.store.checkpoints.latest(caller.tenant, [run], now())
    found = [checkpoint for (_, kind), checkpoint in latest.items() if kind in _SAMPLED]
    if not found:
        raise NotFound("no weights are left of this run")
    return Target.of(max(found, key=lambda checkpoint: checkpoint.created))


async def _named(state: AppState, caller: Caller, run: str, name: str) -> Checkpoint:
    for kind in _SAMPLED:
        try:
            return await _checkpoint(state, caller, CheckpointPath.parse(f"tinker://{run}/{kind}/{name}"))
        except NotFound:
            continue
    raise NotFound("there is no such checkpoint")


async def _checkpoint(state: AppState, caller: Caller, path: CheckpointPath) -> Checkpoint:
    checkpoint = await state.store.checkpoints.find(caller.tenant, path, now())
    state.check_base(checkpoint.base, f"the checkpoint {path}")
    if path.kind not in _SAMPLED:
        raise NotFound("this checkpoint cannot be sampled on this service")
    return checkpoint


async def list_models(state: AppState, caller: Caller) -> list[dict[str, Any]]:
    """Return the base model, and the newest models and checkpoints of the caller, in OpenAI's form."""
    listed = [_entry(state.service.info.name, 0.0, "twinkle")]
    for model in (await state.store.models.page(caller.tenant, _LISTED, 0)).rows:
        if model.status in ("live", "detached") and not model.full and model.base in state.bases:
            listed.append(_entry(model.id, model.created, caller.tenant))
    names = {entry["id"] for entry in listed}
    for checkpoint in (await state.store.checkpoints.page(caller.tenant, now(), _LISTED)).rows:
        name = f"{checkpoint.run}/{checkpoint.name}"
        sampled = checkpoint.kind in _SAMPLED and not checkpoint.full and checkpoint.base in state.bases
        if sampled and checkpoint.name != LATEST and name not in names:
            names.add(name)
            listed.append(_entry(name, checkpoint.created, caller.tenant))
    return listed


async def describe(state: AppState, caller: Caller, name: str) -> dict[str, Any]:
    """Return a model in OpenAI's form.

    Raises:
        ModelNotFound: the caller has no such model.
    """
    record = (await resolve(state, caller, name)).record
    return _entry(name, 0.0, "twinkle") if record is None else _entry(name, record.created, caller.tenant)


def anthropic_form(entry: dict[str, Any], context: int) -> dict[str, Any]:
    """Return a model of `list_models` or `describe` in Anthropic's form.

    Args:
        entry: the model.
        context: most tokens of a prompt and its answer together.
    """
    return {
        "type": "model", "id": entry["id"], "display_name": entry["id"], "created_at": isoformat(entry["created"]),
        "lifecycle": "active", "max_input_tokens": context, "max_tokens": context,
    }  # fmt: skip


def anthropic_page(
    entries: Sequence[dict[str, Any]], limit: int, after: str | None, before: str | None
) -> dict[str, Any]:
    """Return a page of models in Anthropic's form.

    Args:
        entries: all models, in Anthropic's form.
        limit: most models of the page.
        after: id of the model before the page.
        before: id of the model after the page.

    Raises:
        InvalidParameter: both ids are given, or there is no such model.
    """
    if after is not None and before is not None:
        raise InvalidParameter("after_id", "after_id and before_id cannot be combined; give one of them")
    ids = [entry["id"] for entry in entries]
    for param, value in (("after_id", after), ("before_id", before)):
        if value is not None and value not in ids:
            raise InvalidParameter(param, f"{param} must be the id of a listed model, got {value[:300]!r}")
    if before is not None:
        rest = entries[: ids.index(before)]
        page, more = rest[-limit:], len(rest) > limit
    else:
        rest = entries if after is None else entries[ids.index(after) + 1 :]
        page, more = rest[:limit], len(rest) > limit
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": list(page), "has_more": more, "first_id": first, "last_id": last}


def _entry(name: str, created: float, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}

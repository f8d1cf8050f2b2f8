"""The pages of the dashboard and their actions.

A user's key shows the data of its tenant; an operator's key shows all tenants, except texts of rollouts, which it shows
only if the settings allow it. Actions on the service need an operator's key, and every form has the session's token.
"""

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

import orjson
from fastapi import APIRouter, Request, Response

from twinkle_server.dashboard import curves
from twinkle_server.dashboard.login import Keys, Logins, Visitor
from twinkle_server.dashboard.rendering import assets, data, moved, page
from twinkle_server.dashboard.texts import Texts, text_of
from twinkle_server.engine.recording import Rollout
from twinkle_server.errors import BadRequest, Forbidden, NotFound, ServiceError, TooLarge, Unauthorized
from twinkle_server.operations import Operation
from twinkle_server.runtime.core import Cancelled
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings
from twinkle_server.store.figures import Kept, Step
from twinkle_server.store.opening import Store
from twinkle_server.store.records import Model
from twinkle_server.telemetry.overview import Overview

PREFIX: Final = "/ui/"
"""Paths of all pages but the first, which is `/`."""
_FORM_BYTES: Final = 8 * 2**10
_ROWS: Final = 50
_READ_ROLLOUTS: Final = 64
"""Maximum number of rows whose texts the page of a run shows."""
_EXCERPT: Final = 600
_STEPS: Final = 10
_CACHED: Final = 512
"""Maximum number of decoded excerpts in memory."""
_PATHS: Final = {
    "packing": "several sequences in one row, without padding",
    "prefixes": "a prompt that several rows share is computed once",
    "fused": "adapters of several tenants share a pass over the base model",
    "steps": "requests join and leave the sampler at any step",
}
"""What the fast paths of Twinkle's engine do."""
Handler = Callable[["Dashboard", Request, Visitor], Awaitable[Response]]
Endpoint = Callable[["Dashboard", Request], Awaitable[Response]]


def guarded(handler: Handler) -> Endpoint:
    """Return an endpoint that needs a login, and answers errors with pages."""

    @functools.wraps(handler)
    async def endpoint(self: "Dashboard", request: Request) -> Response:
        visitor = None
        try:
            visitor = await self.logins.visitor(request)
            return await handler(self, request, visitor)
        except Unauthorized as error:
            if request.method == "GET" and not request.url.path.endswith(".json"):
                target = request.url.path.lstrip("/") + (f"?{request.url.query}" if request.url.query else "")
                return moved(request, f"ui/login?{urlencode({'next': target})}")
            return page(request, "error.html", error.status, visitor=None, error=error)
        except ServiceError as error:
            return page(request, "error.html", error.status, visitor=visitor, error=error)

    return endpoint


async def form_of(request: Request, *names: str) -> dict[str, str]:
    """Return the fields of a form.

    Args:
        request: with the form.
        names: of the fields that the form has.

    Raises:
        TooLarge: it is larger than any form of the dashboard.
        BadRequest: it has another field.
    """
    body = await request.body()
    if len(body) > _FORM_BYTES:
        raise TooLarge(f"a form must have at most {_FORM_BYTES} bytes, got {len(body)}")
    fields = {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}
    unknown = sorted(fields.keys() - set(names))
    if unknown:
        raise BadRequest(f"the form has the fields {', '.join(names)}, got {', '.join(unknown)[:200]}; reload the page")
    return fields


class Dashboard:
    """The pages.

    Args:
        service: the runtime.
        store: the tables.
        settings: of the service.
        overview: reads the state of the service.
        keys: of the service; None without authentication.
    """

    def __init__(
        self, service: Service, store: Store, settings: Settings, overview: Overview, keys: Keys | None
    ) -> None:
        self._service, self._store, self._settings, self._overview = service, store, settings, overview
        self.logins = Logins(keys, store.secret, store.instance, settings.times.login)
        self._texts = Texts(settings.model)
        self._excerpts: dict[int, dict[str, str]] = {}

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter()
        for method, path, endpoint in (
            ("GET", "/", self.front),
            ("GET", "/ui/login", self.login),
            ("POST", "/ui/login", self.open),
            ("POST", "/ui/logout", self.close),
            ("GET", "/ui/models", self.models),
            ("GET", "/ui/operations", self.operations),
            ("GET", "/ui/checkpoints", self.checkpoints),
            ("GET", "/ui/errors", self.errors),
            ("GET", "/ui/drain", self.drain),
            ("POST", "/ui/drain", self.drain),
            ("GET", "/ui/runs/{run}", self.run),
            ("GET", "/ui/runs/{run}/steps.json", self.steps),
            ("GET", "/ui/runs/{run}/rollouts/{rollout}", self.rollout),
            ("POST", "/ui/runs/{run}/forget", self.forget),
            ("GET", "/ui/runs/{run}/cancel", self.cancel_model),
            ("POST", "/ui/runs/{run}/cancel", self.cancel_model),
            ("GET", "/ui/operations/{operation}/cancel", self.cancel_operation),
            ("POST", "/ui/operations/{operation}/cancel", self.cancel_operation),
            ("GET", "/ui/static/{file}", self.static),
        ):
            router.add_api_route(path, _plain(endpoint), methods=[method], include_in_schema=False)
        return router

    # Login

    async def login(self, request: Request) -> Response:
        """Show the form that asks for a key."""
        if not self.logins.needed:
            return moved(request, "")
        return page(request, "login.html", next=_next(request.query_params.get("next", "")), problem=None)

    async def open(self, request: Request) -> Response:
        """Log in."""
        try:
            fields = await form_of(request, "key", "next")
            target = _next(fields.get("next", ""))
            response = moved(request, target)
            await self.logins.open(request, fields.get("key", "").strip(), response)
        except Unauthorized as error:
            return page(request, "login.html", error.status, next=target, problem=error.message)
        except ServiceError as error:
            return page(request, "login.html", error.status, next="", problem=error.message)
        return response

    @guarded
    async def close(self, request: Request, visitor: Visitor) -> Response:
        """Log out."""
        self.logins.check(visitor, (await form_of(request, "csrf")).get("csrf", ""))
        response = moved(request, "ui/login")
        self.logins.close(request, response)
        return response

    # Pages

    @guarded
    async def front(self, request: Request, visitor: Visitor) -> Response:
        """Show the state of the service."""
        state = await self._overview.read(visitor.tenant)
        return page(request, "overview.html", visitor=visitor, here="overview", state=state, what_paths_do=_PATHS)

    @guarded
    async def models(self, request: Request, visitor: Visitor) -> Response:
        """List models, newest request first."""
        self._service.locate()
        offset, status = _offset(request), request.query_params.get("status", "")
        statuses = (status,) if status in ("live", "detached", "corrupted", "gone", "creating") else ()
        found = await self._store.views.models(visitor.tenant, _ROWS, offset, statuses)
        waiting = self._waiting(visitor.tenant)
        rows = [self._overview.model(model, waiting.get(model.id, 0)) for model in found.rows]
        values: dict[str, Any] = {
            "rows": rows,
            "total": found.total,
            "offset": offset,
            "limit": _ROWS,
            "status": status,
        }
        return page(request, "models.html", visitor=visitor, here="models", **values)

    @guarded
    async def operations(self, request: Request, visitor: Visitor) -> Response:
        """List unfinished operations, oldest first."""
        found = self._service.unfinished(visitor.tenant)
        rows = [{"entry": entry, "why": self._why(entry.operation)} for entry in found[:_ROWS]]
        values: dict[str, Any] = {"rows": rows, "total": len(found), "notice": _notice(request)}
        return page(request, "operations.html", visitor=visitor, here="operations", **values)

    @guarded
    async def checkpoints(self, request: Request, visitor: Visitor) -> Response:
        """List checkpoints, newest first."""
        offset = _offset(request)
        found = await self._store.views.checkpoints(visitor.tenant, _ROWS, offset)
        values: dict[str, Any] = {"rows": found.rows, "total": found.total, "offset": offset, "limit": _ROWS}
        return page(request, "checkpoints.html", visitor=visitor, here="checkpoints", **values)

    @guarded
    async def errors(self, request: Request, visitor: Visitor) -> Response:
        """List failed operations, newest first."""
        rows = await self._store.views.failures(visitor.tenant, 2 * _ROWS)
        return page(request, "errors.html", visitor=visitor, here="errors", rows=rows)

    @guarded
    async def run(self, request: Request, visitor: Visitor) -> Response:
        """Show a run: curves, rollouts, checkpoints, errors."""
        model = await self._model(request, visitor)
        self._service.locate()
        steps = curves.points(await self._store.figures.steps(model.tenant, model.id, newest=_STEPS))
        checkpoints = await self._store.views.checkpoints(model.tenant, _ROWS, run=model.id)
        waiting = [entry for entry in self._service.unfinished(model.tenant) if entry.operation.queue_id == model.id]
        values: dict[str, Any] = {
            "run": model,
            "state": self._overview.model(model, len(waiting)),
            "why": self._service.queue_state(model.id)[1] if waiting else None,
            "waiting": waiting[:_ROWS],
            "running": sum(entry.running for entry in waiting),
            "notice": _notice(request),
            "steps": steps[-_STEPS:][::-1],
            "count": steps[-1]["step"] if steps else 0,
            "titles": curves.NAMES,
            "checkpoints": checkpoints.rows,
            "errors": await self._store.views.failures(model.tenant, 10, model.id),
            "readable": self._readable(visitor, model),
            "rollouts": await self._rollouts(visitor, model),
            "keeps": self._settings.rollouts.rows,
        }
        return page(request, "run.html", visitor=visitor, here="models", **values)

    @guarded
    async def steps(self, request: Request, visitor: Visitor) -> Response:
        """Return the curves of a run after a step, for the script of its page."""
        model = await self._model(request, visitor)
        after = request.query_params.get("after", "0")
        if not after.isdigit():
            raise BadRequest(f"after must be the number of a step, got {after[:40]!r}")
        first = max(0, int(after) - 1)  # the step before gives the first one its duration
        steps = await self._store.figures.steps(model.tenant, model.id, first)
        return data(await asyncio.to_thread(_curves, steps, int(after)))

    @guarded
    async def rollout(self, request: Request, visitor: Visitor) -> Response:
        """Show a recorded row token by token."""
        model = await self._model(request, visitor)
        if not self._readable(visitor, model):
            raise Forbidden(
                "texts of rollouts are shown only to their tenant; the service can allow operators to read them "
                "(`twinkle serve --operators-read-rollouts`)"
            )
        text = request.path_params["rollout"]
        if not text.isdigit():
            raise NotFound(f"rollout {text[:40]!r} does not exist")
        kept = await self._store.rollouts.get(model.tenant, model.id, int(text))
        decoded = await self._texts.ready()
        pieces = await asyncio.to_thread(self._texts.pieces, Rollout.parse(kept.data))
        values: dict[str, Any] = {"run": model, "kept": kept, "pieces": pieces, "decoded": decoded}
        return page(request, "rollout.html", visitor=visitor, here="models", **values)

    async def static(self, request: Request) -> Response:
        """Return a file of the pages."""
        response = assets().get(request.path_params["file"])
        if response is None:
            raise NotFound("this file does not exist")
        return response

    # Actions

    @guarded
    async def forget(self, request: Request, visitor: Visitor) -> Response:
        """Delete the recorded rows of a run, on request of its tenant."""
        model = await self._model(request, visitor)
        self.logins.check(visitor, (await form_of(request, "csrf")).get("csrf", ""))
        await self._store.rollouts.remove(model.tenant, model.id)
        return moved(request, f"ui/runs/{model.id}")

    @guarded
    async def drain(self, request: Request, visitor: Visitor) -> Response:
        """Ask for confirmation, or let the service finish its work and exit."""
        question = "Drain the service: refuse new operations, finish running ones, save all models, and exit?"
        refused = await self._confirm(request, visitor, "Drain", question, "")
        if refused is None:
            self._service.request_stop()
        return refused or page(request, "drained.html", visitor=visitor, here="overview")

    @guarded
    async def cancel_model(self, request: Request, visitor: Visitor) -> Response:
        """Ask for confirmation, or cancel the waiting operations of a model."""
        model = await self._model(request, visitor)
        question = f"Cancel the waiting operations of {model.id}? Operations that run already run to their end."
        refused = await self._confirm(request, visitor, "Cancel operations", question, f"ui/runs/{model.id}")
        if refused is not None:
            return refused
        found = await self._service.cancel_waiting(model.id)
        return moved(request, f"ui/runs/{model.id}?{urlencode(asdict(found))}")

    @guarded
    async def cancel_operation(self, request: Request, visitor: Visitor) -> Response:
        """Ask for confirmation, or cancel an operation."""
        text = request.path_params["operation"]
        found = [
            entry.operation for entry in self._service.unfinished(visitor.tenant) if str(entry.operation.id) == text
        ]
        if not found:
            raise NotFound(f"operation {text[:40]!r} does not exist or has finished")
        (operation,) = found
        question = f"Cancel operation {operation.number} ({operation.kind}) of {operation.queue_id}?"
        if operation.id in {entry.operation.id for entry in self._service.unfinished() if entry.running}:
            question += " It runs already: only sampling can be interrupted, training runs to its end."
        refused = await self._confirm(request, visitor, "Cancel operation", question, "ui/operations")
        if refused is not None:
            return refused
        ended = await self._service.cancel_operations([operation])
        return moved(request, f"ui/operations?{urlencode(asdict(ended))}")

    async def _confirm(
        self, request: Request, visitor: Visitor, action: str, question: str, back: str
    ) -> Response | None:
        """Return the page that asks for confirmation, or None if the form was sent with an operator's rights.

        A user's session must give an operator's key with the form; the audit log names the key that was used.
        """
        operator = visitor.caller.role == "operator"
        values: dict[str, Any] = {"visitor": visitor, "here": "", "action": action, "question": question, "back": back}
        if request.method == "GET":
            return page(request, "confirm.html", **values, operator=operator, problem=None)
        fields = await form_of(request, "csrf", "key")
        self.logins.check(visitor, fields.get("csrf", ""))
        if operator:
            return None
        try:
            caller = await self.logins.identify(fields.get("key", "").strip())
        except Unauthorized as error:
            return page(request, "confirm.html", 403, **values, operator=False, problem=error.message)
        if caller.role != "operator":
            problem = "this action needs the key of an operator; this key belongs to a user"
            return page(request, "confirm.html", 403, **values, operator=False, problem=problem)
        request.scope["caller"] = caller
        return None

    # Parts

    async def _model(self, request: Request, visitor: Visitor) -> Model:
        return await self._store.views.model(visitor.tenant, request.path_params["run"])

    def _readable(self, visitor: Visitor, model: Model) -> bool:
        """Return whether somebody may read the texts of a run."""
        return visitor.caller.tenant == model.tenant or (visitor.tenant is None and self._settings.rollouts.operator)

    async def _rollouts(self, visitor: Visitor, model: Model) -> list[dict[str, Any]]:
        """Return the recorded rows of a run, with texts if the visitor may read them; neighbours share a prompt."""
        kept = await self._store.rollouts.of_run(model.tenant, model.id, self._settings.rollouts.rows)
        rows: list[dict[str, Any]] = [{"kept": entry, "prompt": None, "text": None} for entry in kept]
        if self._readable(visitor, model):
            await self._texts.ready()
            for row in rows[:_READ_ROLLOUTS]:
                row.update(await self._excerpt(row["kept"]))
        groups = itertools.groupby(rows, key=lambda row: row["prompt"])
        return [{"prompt": prompt, "rows": list(members)} for prompt, members in groups]

    async def _excerpt(self, kept: Kept) -> dict[str, str]:
        """Return the texts of a row, which pages ask for again every few seconds."""
        if kept.id in self._excerpts:
            return self._excerpts[kept.id]
        try:
            whole = await self._store.rollouts.get(kept.tenant, kept.run, kept.id)
        except NotFound:  # replaced by a newer one meanwhile
            return {}
        pieces = await asyncio.to_thread(self._texts.pieces, Rollout.parse(whole.data))
        texts = {"prompt": text_of(pieces, False)[-_EXCERPT:], "text": text_of(pieces, True)[:_EXCERPT]}
        while len(self._excerpts) >= _CACHED:
            del self._excerpts[next(iter(self._excerpts))]
        self._excerpts[kept.id] = texts
        return texts

    def _waiting(self, tenant: str | None) -> dict[str, int]:
        waiting: dict[str, int] = {}
        for entry in self._service.unfinished(tenant):
            waiting[entry.operation.queue_id] = waiting.get(entry.operation.queue_id, 0) + 1
        return waiting

    def _why(self, operation: Operation) -> str:
        return self._service.queue_state(operation.queue_id)[1] or ""


def _plain(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[..., Any]:
    """Return an endpoint with the one parameter by which `RequestRoute` recognizes it."""

    async def plain(request: Request) -> Response:
        return await endpoint(request)

    return plain


def _curves(steps: Sequence[Step], after: int) -> bytes:
    points = [point for point in curves.points(steps) if point["step"] > after]
    return orjson.dumps({"titles": curves.NAMES, "points": points})


def _offset(request: Request) -> int:
    text = request.query_params.get("offset", "0")
    return int(text) if text.isdigit() and len(text) < 10 else 0


def _notice(request: Request) -> str | None:
    """Return what the cancellation did that led to this page: its counts are in the address."""
    texts = [request.query_params.get(name, "") for name in asdict(Cancelled())]
    if not all(text.isdigit() and len(text) < 10 for text in texts):
        return None
    found = Cancelled(*map(int, texts))
    notice = f"{_count(found.cancelled)} cancelled."
    if found.running:
        notice += f" {_count(found.running)} had begun and will run to the end."
    if found.undecided:
        notice += f" The engine has not answered yet for {_count(found.undecided)}: it answers between two passes."
    return notice


def _count(operations: int) -> str:
    return f"{operations or 'No'} operation{'' if operations == 1 else 's'}"


def _next(target: str) -> str:
    """Return a page of the dashboard to go to after the login; any other target becomes the first page."""
    safe = target.startswith(PREFIX[1:]) and not any(mark in target for mark in ("//", "\\", "..", "\r", "\n"))
    return target if safe else ""

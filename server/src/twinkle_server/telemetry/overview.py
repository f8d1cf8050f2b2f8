"""The state of the service for the dashboard and `twinkle top`: for a tenant, or for operators as a whole."""

import time
from typing import Any, Final

from twinkle_server.runtime.service import Service
from twinkle_server.store.opening import Store
from twinkle_server.store.records import Model
from twinkle_server.telemetry.window import Window

_MODELS: Final = 20
_ERRORS: Final = 10


class Overview:
    """Collects the state.

    Args:
        service: the runtime.
        store: the tables.
        window: rates of the last minutes.
    """

    def __init__(self, service: Service, store: Store, window: Window) -> None:
        self._service, self._store, self._window = service, store, window

    async def read(self, tenant: str | None) -> dict[str, Any]:
        """Return the state as JSON data.

        Args:
            tenant: whose models, operations and errors are included; None includes all.
        """
        service = self._service
        service.locate()
        status = service.runtime_status.status()
        page = await self._store.views.models(tenant, _MODELS, statuses=("creating", "live", "detached", "corrupted"))
        unfinished = service.unfinished(tenant)
        failures = await self._store.views.failures(tenant, _ERRORS)
        waiting: dict[str, int] = {}
        for entry in unfinished:
            waiting[entry.operation.queue_id] = waiting.get(entry.operation.queue_id, 0) + 1
        return {
            "time": time.time(),
            "model": service.info.name,
            "scope": tenant,
            **{name: status[name] for name in ("ready", "engine", "last_pass", "store", "draining", "paths")},
            **{name: status[name] for name in ("up_seconds", "engine_restarts")},
            "rates": self._window.report(tenant),
            "queue": {
                "unfinished": len(unfinished),
                "in_engine": sum(entry.in_engine for entry in unfinished),
                "running": sum(entry.running for entry in unfinished),
                "oldest_seconds": round(unfinished[0].seconds, 1) if unfinished else 0.0,
            },
            "tenants": await self._tenants(tenant),
            "models": [self.model(model, waiting.get(model.id, 0)) for model in page.rows],
            "models_total": page.total,
            "errors": [
                {"time": error.time, "tenant": error.tenant, "model": error.queue_id, "number": error.number,
                 "kind": error.kind, "category": error.category, "error": error.error}
                for error in failures
            ],
        }  # fmt: skip

    async def _tenants(self, tenant: str | None) -> list[dict[str, Any]]:
        speeds = self._window.by_tenant()
        queued: dict[str, int] = {}
        for entry in self._service.unfinished(tenant):
            queued[entry.operation.tenant] = queued.get(entry.operation.tenant, 0) + 1
        return [
            {
                "tenant": row.tenant,
                "live": row.models.get("live", 0) + row.models.get("creating", 0),
                "detached": row.models.get("detached", 0),
                "unfinished": queued.get(row.tenant, 0),
                "tokens_per_second": speeds.get(row.tenant, 0.0),
                "tokens_today": sum(row.tokens.values()),
                "checkpoint_bytes": row.bytes,
                "keys": row.keys,
            }
            for row in await self._store.views.tenants(tenant)
        ]

    def model(self, model: Model, unfinished: int = 0) -> dict[str, Any]:
        """Return the state of a model as JSON data.

        Args:
            model: its row.
            unfinished: number of its operations without an outcome.
        """
        return {
            "model": model.id,
            "tenant": model.tenant,
            "status": model.status,
            "reason": model.reason,
            "place": self._service.place(model.id) if model.status in ("live", "creating", "detached") else "",
            "bytes": sum(self._service.places.get(model.id, ())),
            "rank": model.rank,
            "unfinished": unfinished,
            "last_request": model.last_request,
        }

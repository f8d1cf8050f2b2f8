"""The parts of one service put together: application, middleware, keys, figures, and what looks after the disk."""

from typing import Any

from twinkle_server.application import create_application
from twinkle_server.checkpoints.links import Links, download_routes
from twinkle_server.limits.middleware import ArrivalMiddleware, BodyLimitMiddleware, RequestHeadMiddleware
from twinkle_server.routing import add_routes
from twinkle_server.runtime.service import Service
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store
from twinkle_server.telemetry.health import INSIDE, PROBES, Access, folder_token, health_routes
from twinkle_server.telemetry.metrics import Metrics
from twinkle_server.telemetry.requests import TelemetryMiddleware
from twinkle_server.tenancy.audit import AuditMiddleware
from twinkle_server.tenancy.auth import Authentication
from twinkle_server.tenancy.keys import Keyring
from twinkle_server.tenancy.limited import Limited
from twinkle_server.tenancy.quotas import Meter


def assemble(settings: Settings, store: Store, service: Service, metrics: Metrics) -> Any:
    """Return the outermost ASGI application.

    Args:
        settings: of the service.
        store: open.
        service: the runtime.
        metrics: that the service counts into.
    """
    keys = Keyring(store.keys.all) if settings.auth else None
    links = Links(settings.data, store.secret)
    meter = Meter(service.queued)
    faces = create_application(Limited(service, meter), store, settings, links)
    add_routes(faces.router, download_routes(links))

    async def status() -> dict[str, Any]:
        return await service.status()

    access = Access(keys, folder_token(store.secret), settings.local_metrics)
    add_routes(faces.router, health_routes(service.ready, status, metrics, access))
    bodies = BodyLimitMiddleware(AuditMiddleware(faces, store.audit), settings.limits)
    metrics.watch("body_bytes", "Bytes of requests in memory.", lambda: float(bodies.budget.used))
    guarded = Authentication(ArrivalMiddleware(bodies, service.arrivals), keys, PROBES | INSIDE)
    return RequestHeadMiddleware(TelemetryMiddleware(guarded, metrics))

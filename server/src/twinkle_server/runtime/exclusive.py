"""The full-parameter model that has the service for itself, while there is one."""

import time
from typing import Final

from twinkle_server.errors import Locked, NotFound
from twinkle_server.store.models import Models

_LIVE: Final = ("creating", "live")
_CREATION: Final = 10.0
"""Seconds within which the row of a model that reserved the service must appear."""


class ExclusiveModel:
    """Reserves the service for the tenant of a full-parameter model, until the model is unloaded or its session ends.

    A reservation is never taken away, and takes nothing away: a tenant whose work is in progress prevents it.

    Args:
        models: their table, which tells whether the model still exists.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._holder: tuple[str, str] | None = None
        self._since = 0.0

    async def resume(self) -> None:
        """Reserve the service for the model that had it before a restart."""
        for model in await self._models.with_status("live", "creating"):
            if model.full:
                self._holder, self._since = (model.tenant, model.id), time.monotonic()

    async def reserve(self, tenant: str, model: str) -> None:
        """Reserve the service for a model.

        Raises:
            Locked: another full-parameter model exists, or other tenants have models in use.
        """
        if self._holder == (tenant, model):
            return
        if await self._held():
            raise Locked("another full-parameter model has this service; try again after it was unloaded")
        others = [found for found in await self._models.with_status("live", "creating") if found.tenant != tenant]
        if self._holder is not None and self._holder != (tenant, model):  # another request was faster
            raise Locked("another full-parameter model has this service; try again after it was unloaded")
        if others:
            raise Locked(
                f"training all parameters needs the whole service, and {len(others)} models of others are in use; try "
                "again after their sessions have ended"
            )
        self._holder, self._since = (tenant, model), time.monotonic()

    async def check(self, tenant: str) -> None:
        """Refuse a tenant while the service is reserved for another.

        Raises:
            Locked: it is.
        """
        if self._holder is None or self._holder[0] == tenant:
            return
        if await self._held():
            raise Locked(
                "this service is reserved for a full-parameter training of another tenant; try again after it has ended"
            )

    async def _held(self) -> bool:
        """Return whether the model that reserved the service still exists; otherwise end the reservation."""
        holder = self._holder
        if holder is None:
            return False
        try:
            alive = (await self._models.get(*holder)).status in _LIVE
        except NotFound:
            alive = time.monotonic() - self._since < _CREATION
        if not alive and self._holder == holder:
            self._holder = None
        return alive

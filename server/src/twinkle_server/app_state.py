"""State that the endpoints of all protocols share: the running service, the tables, and the caller."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request

from twinkle_server.chat.render import Renderer
from twinkle_server.checkpoints.links import Links
from twinkle_server.data.resources import DataResources
from twinkle_server.engine.native.templates import Templates
from twinkle_server.errors import Gone, NotFound, Unavailable
from twinkle_server.hub_uploads.uploads import HubUploads
from twinkle_server.ports import Database, Service
from twinkle_server.settings import Settings
from twinkle_server.store.checkpoints import Checkpoints
from twinkle_server.store.models import Models
from twinkle_server.store.recorded import Recorded
from twinkle_server.store.records import Model, Sampler
from twinkle_server.store.samplers import Samplers
from twinkle_server.store.sessions import Sessions
from twinkle_server.store.tenants import Audit, UsageTable
from twinkle_server.tenancy.auth import Caller, caller_of

V = TypeVar("V")
_MOST = 4096


class Recent(Generic[V]):
    """A cache of values by tenant and id; missing values are not cached.

    Args:
        seconds: lifetime of a value.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[tuple[str, str], tuple[float, V]] = {}

    async def get(self, key: tuple[str, str], find: Callable[[], Awaitable[V]]) -> V:
        """Return the value of a key.

        Args:
            key: tenant and id.
            find: reads the value from the store.
        """
        known = self._known.get(key)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        value = await find()
        self._known.pop(key, None)
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = (time.monotonic() + self._seconds, value)
        return value

    def forget(self) -> None:
        """Clear the cache."""
        self._known.clear()


__all__ = ["AppState", "Caller", "Records", "app_state_of", "caller_of"]


class Records(Protocol):
    """The part of the store that endpoints need."""

    @property
    def database(self) -> Database:
        """Runs transactions."""

    @property
    def sessions(self) -> Sessions:
        """See `store.sessions`."""

    @property
    def models(self) -> Models:
        """See `store.models`."""

    @property
    def samplers(self) -> Samplers:
        """See `store.samplers`."""

    @property
    def checkpoints(self) -> Checkpoints:
        """See `store.checkpoints`."""

    @property
    def recorded(self) -> Recorded:
        """See `store.recorded`."""

    @property
    def audit(self) -> Audit:
        """See `store.audit`."""

    @property
    def usage(self) -> UsageTable:
        """See `store.usage`."""


@dataclass(slots=True)
class AppState:
    """State that endpoints share.

    Attributes:
        service: runs operations.
        store: the tables.
        settings: of the service.
        links: creates signed links; None if downloads are disabled.
        renderer: of text for the chat endpoints; None if they are disabled.
        models: cache of models; only their owner and session, which never change, may be relied on.
        samplers: cache of sampling sessions.
        data: data resources; None if the service does not offer any.
        uploads: uploads to hubs; None if the service does not offer them.
        templates: encode conversations for sampling.
    """

    service: Service
    store: Records
    settings: Settings
    links: Links | None = None
    renderer: Renderer | None = None
    models: Recent[Model] = field(default_factory=lambda: Recent(seconds=5.0))
    samplers: Recent[Sampler] = field(default_factory=lambda: Recent(seconds=5.0))
    data: DataResources | None = None
    uploads: HubUploads | None = None
    templates: Templates = field(init=False)

    def __post_init__(self) -> None:
        self.templates = Templates(self.settings.model, self.settings.in_process_losses)

    async def model(self, caller: Caller, model: str) -> Model:
        """Return a model of the caller, possibly from the cache.

        Raises:
            NotFound: the caller has no such model.
        """
        return await self.models.get((caller.tenant, model), lambda: self.store.models.get(caller.tenant, model))

    async def sampler(self, caller: Caller, sampler: str) -> Sampler:
        """Return a sampling session of the caller, possibly from the cache.

        Raises:
            NotFound: the caller has no such sampling session.
            Gone: it belongs to another base model than the served one.
        """
        found = await self.samplers.get(
            (caller.tenant, sampler), lambda: self.store.samplers.get(caller.tenant, sampler)
        )
        self.check_base(found.base, f"sampling session {sampler!r}")
        return found

    @property
    def bases(self) -> tuple[str, str]:
        """Names of the served base model: that for clients, and its folder, under which earlier versions served it."""
        return self.service.info.name, self.settings.model

    def check_base(self, base: str, what: str) -> None:
        """Refuse to use what belongs to another base model: its numbers would be wrong.

        Args:
            base: name of the base model.
            what: belongs to it, for the message.

        Raises:
            Gone: the service serves another base model.
        """
        if base not in self.bases:
            raise Gone(
                f"{what} belongs to the base model {base!r}, but this service serves {self.service.info.name!r}; it "
                "can be used again when the operator serves that model under its name"
            )

    def require_links(self) -> Links:
        """Return the creator of signed links.

        Raises:
            NotFound: downloads are disabled.
        """
        if self.links is None:
            raise NotFound("checkpoint downloads are disabled on this service")
        return self.links


def app_state_of(request: Request) -> AppState:
    """Return the state of the application.

    Raises:
        Unavailable: the service is starting.
    """
    state: Any = getattr(request.app.state, "state", None)
    if not isinstance(state, AppState):
        raise Unavailable("the service is starting")
    return state


def now() -> float:
    """Return the time in UTC seconds, rounded to microseconds as in responses, so that cursors compare equal."""
    return round(time.time(), 6)

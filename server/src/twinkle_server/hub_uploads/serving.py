"""The uploads of a service with a store."""

from pathlib import Path

from twinkle_server.app_state import now
from twinkle_server.hub_uploads.uploads import HubUploads
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store
from twinkle_server.store.records import Checkpoint

_NEWEST = 100


def hub_uploads(settings: Settings, store: Store) -> HubUploads:
    """Return the uploads of a service.

    Args:
        settings: of the service.
        store: with the checkpoints.
    """

    async def saved(tenant: str, run: str) -> list[Checkpoint]:
        return (await store.checkpoints.page(tenant, now(), _NEWEST, run=run)).rows

    name = settings.tokenizer or settings.served_name
    base = None if Path(name).is_absolute() else name
    return HubUploads(settings.uploads, settings.data, base, saved)

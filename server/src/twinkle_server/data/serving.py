"""The data resources of a service with a store."""

from twinkle_server.data.resources import DataResources
from twinkle_server.data.rules import Rules
from twinkle_server.errors import NotFound
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store


def data_resources(settings: Settings, store: Store) -> DataResources:
    """Return the data resources of a service.

    Args:
        settings: with the resolved folder of the model.
        store: knows the sessions.
    """

    async def is_active(tenant: str, session: str) -> bool:
        try:
            return (await store.sessions.get(tenant, session)).status == "active"
        except NotFound:
            return False

    names = {settings.served_name, settings.tokenizer or settings.served_name}
    rules = Rules.of(settings.datasets, dict.fromkeys(names, settings.model))
    return DataResources(settings.datasets, rules, store.secret, is_active)

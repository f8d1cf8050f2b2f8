"""Errors of the service as a command tells them."""

from collections.abc import Iterator
from contextlib import contextmanager

from twinkle.errors import ConfigError
from twinkle_server.errors import ServiceError
from twinkle_server.store.faults import StoreError


@contextmanager
def told() -> Iterator[None]:
    """Turn an error of the service into one that the command line shows as a message."""
    try:
        yield
    except (ServiceError, StoreError) as error:
        raise ConfigError(str(error)) from error

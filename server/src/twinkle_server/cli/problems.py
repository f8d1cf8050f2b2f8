"""Errors of the service as a command tells them."""

from collections.abc import Iterator
from contextlib import contextmanager

from twinkle.errors import ConfigError
from twinkle_server.errors import ServiceError


@contextmanager
def told() -> Iterator[None]:
    """Turn an error that the service would answer with into one that the command line shows as a message."""
    try:
        yield
    except ServiceError as error:
        raise ConfigError(error.message) from error

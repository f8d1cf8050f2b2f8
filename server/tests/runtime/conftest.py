"""Engines are started, and models made, again at once here."""

import pytest

from twinkle_server.runtime import dispatch, supervision


@pytest.fixture(autouse=True, scope="session")
def _no_pauses() -> None:
    supervision.PAUSES = (0.0, 0.01)
    dispatch.PAUSES = (0.0, 0.01)

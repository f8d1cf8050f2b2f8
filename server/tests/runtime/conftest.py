"""Engines are started again at once here."""

import pytest

from twinkle_server.runtime import supervision


@pytest.fixture(autouse=True, scope="session")
def _no_pauses() -> None:
    supervision.PAUSES = (0.0, 0.01)

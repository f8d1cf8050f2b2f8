"""Engines are restarted and models restored at once in these tests."""

import pytest

from twinkle_server.runtime import dispatch, supervision


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "PAUSES", (0.0, 0.01))
    monkeypatch.setattr(dispatch, "PAUSES", (0.0, 0.01))

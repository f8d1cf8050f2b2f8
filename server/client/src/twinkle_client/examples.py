"""Examples for the contract kit."""

from types import SimpleNamespace

from twinkle_client.http import Connection

HTTP = {"kwargs": {"client": SimpleNamespace(connection=Connection("http://127.0.0.1:1"), session_id="none")}}

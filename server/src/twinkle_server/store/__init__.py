"""Persistent data: an SQLite database, and files for large payloads and results."""

from twinkle_server.store.opening import Store, open_store

__all__ = ["Store", "open_store"]

"""Everything that must outlive the process: a database in SQLite, and files of payloads and results beside it."""

from twinkle_server.store.opening import Store, open_store

__all__ = ["Store", "open_store"]

"""Data sets: rows in memory, lazily mapped rows, streams, and packing of encoded rows."""

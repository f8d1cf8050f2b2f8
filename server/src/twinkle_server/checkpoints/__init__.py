"""Checkpoint files: downloads, trash, and upkeep."""

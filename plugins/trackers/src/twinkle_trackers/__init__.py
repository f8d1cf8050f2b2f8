"""Trackers: jsonl, TensorBoard."""

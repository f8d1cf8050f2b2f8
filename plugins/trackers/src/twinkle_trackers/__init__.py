"""Trackers: what a run's numbers are written to: files of its own folder, TensorBoard, services."""

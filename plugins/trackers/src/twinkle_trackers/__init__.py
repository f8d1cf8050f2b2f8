"""Trackers: record the numbers of a run in files of its folder, in TensorBoard, or at a service."""

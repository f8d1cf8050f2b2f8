"""Trackers: what a run's numbers are written to. `JsonlTracker` and `TensorBoardTracker`."""

"""Common parts of all recipes: start, checkpoints, stop and resumption of a run."""

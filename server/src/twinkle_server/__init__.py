"""The training service: a durable log of operations for each model, an engine in a child process, and its faces."""

"""The training service: a durable log of operations per model, an engine in a child process, and HTTP endpoints."""

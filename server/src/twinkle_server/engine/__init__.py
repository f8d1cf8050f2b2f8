"""The child process's half: queues, fused passes and decode steps over an engine."""

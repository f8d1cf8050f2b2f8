"""The child process's half: lanes, fused passes and decode steps over an engine."""

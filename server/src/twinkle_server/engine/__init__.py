"""The child process's half: lanes, fused passes and decode steps over a backend."""

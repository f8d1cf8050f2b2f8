"""The engine process: task queues, fused passes, and decode steps on an engine."""

"""Logs, metrics and the state of the service, without secrets."""

"""Logs, metrics and status of the service, without secrets."""

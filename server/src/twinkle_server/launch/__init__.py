"""Starts the service from the published configuration file (`applications:`)."""

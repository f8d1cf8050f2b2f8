"""Notifiers: messages to people when a run fails."""

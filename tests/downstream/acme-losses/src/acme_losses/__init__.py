"""Losses of Acme."""

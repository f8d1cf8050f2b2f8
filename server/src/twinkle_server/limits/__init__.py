"""Limits on everything that an unauthenticated client can send."""

"""Losses of requests: which ones there are, how they are built, and where they are computed."""

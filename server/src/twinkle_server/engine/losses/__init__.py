"""Losses of requests: the catalog, their construction, and where they are computed."""

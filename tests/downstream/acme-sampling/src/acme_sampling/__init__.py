"""A sampler and a hook of Acme."""

"""Weights on their way from a trainer to a sampler."""

"""Samplers that use other samplers."""

from twinkle_agentic.sampler.router_sampler import RouterSampler

__all__ = ["RouterSampler"]

"""Rollouts of several turns, tools and environments."""

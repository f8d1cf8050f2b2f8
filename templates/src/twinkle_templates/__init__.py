"""Scaffolds of plugins: one for every kind of component that people write."""

"""Patches: changes to models and libraries that can be undone."""

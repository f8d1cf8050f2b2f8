"""Focal loss, as a repository of a hub."""

"""Focal loss, as a repository of a Hub."""

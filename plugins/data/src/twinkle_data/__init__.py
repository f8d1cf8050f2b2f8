"""Data sets of the house, preprocessors and filters."""

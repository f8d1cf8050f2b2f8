"""Recipes: whole runs, each one readable loop."""

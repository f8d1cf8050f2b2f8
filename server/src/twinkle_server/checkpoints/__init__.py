"""Checkpoints as folders that are whole or not there."""

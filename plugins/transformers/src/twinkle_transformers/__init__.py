"""Trains and samples Hugging Face models."""

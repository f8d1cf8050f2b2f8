"""Hubs: Hugging Face, ModelScope and folders behind one interface: weights, data sets, code."""

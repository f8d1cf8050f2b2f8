"""Tensor code that several plugins use: the loss head, packed attention, numerics."""

"""Kernels: faster forms of layers and functions, by device."""

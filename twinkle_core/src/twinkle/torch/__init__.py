"""Tensor code that several plugins need, the one place of the core that imports torch; only plugins import it."""

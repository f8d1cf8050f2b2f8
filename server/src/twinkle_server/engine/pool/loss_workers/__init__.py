"""Losses of plugins, computed in processes of their own, so that one that hangs or crashes costs its tenant only."""

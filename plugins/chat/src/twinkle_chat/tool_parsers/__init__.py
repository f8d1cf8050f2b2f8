"""Tool-call parsers: one module a format."""

"""Chat templates and tool-call parsers."""

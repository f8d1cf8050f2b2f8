"""The HTTP endpoints of the Tinker protocol, as used by the unmodified SDK."""

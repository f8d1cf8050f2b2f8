"""Published import paths; their contents are defined in `twinkle.platform`."""

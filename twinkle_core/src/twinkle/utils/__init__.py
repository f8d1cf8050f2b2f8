"""Published paths that scripts import; what they hold lives in `twinkle.platform`."""

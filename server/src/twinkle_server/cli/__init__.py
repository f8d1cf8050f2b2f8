"""The commands `twinkle serve` and `twinkle server`."""

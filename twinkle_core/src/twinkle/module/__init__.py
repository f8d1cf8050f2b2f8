"""Published parent of `twinkle.module.scheduler`."""

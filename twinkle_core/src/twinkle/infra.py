"""Published path of initialization, placement and remote execution; `twinkle.runtime` implements them."""

from twinkle.runtime import get_device_placement, initialize, is_master, remote_class, remote_function

__all__ = ["get_device_placement", "initialize", "is_master", "remote_class", "remote_function"]

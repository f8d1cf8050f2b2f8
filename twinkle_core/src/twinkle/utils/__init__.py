"""Published import paths; their contents are defined in `twinkle.platform` and other modules of core."""

from typing import Any

_NAMES = (
    "GPU", "NPU", "DeviceGroup", "DeviceMesh", "Platform", "Plugin", "check_unsafe", "exists", "find_free_port",
    "find_node_ip", "get_logger", "requires", "trust_remote_code",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        import twinkle

        return getattr(twinkle, name)
    raise AttributeError(f"module 'twinkle.utils' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted(_NAMES)

"""Twinkle: a training workbench for large language models in which every component is a plugin.

No heavy package is imported here; each public name loads its module when it is first used (PEP 562).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__release_datetime__ = "2026-11-21 00:00:00"

_WHERE = {
    "initialize": "twinkle.runtime",
    "remote_class": "twinkle.runtime",
    "remote_function": "twinkle.runtime",
    "get_device_placement": "twinkle.runtime",
    "is_master": "twinkle.runtime",
    "DeviceMesh": "twinkle.mesh",
    "DeviceGroup": "twinkle.mesh",
    "Platform": "twinkle.platform",
    "CPU": "twinkle.platform",
    "GPU": "twinkle.platform",
    "NPU": "twinkle.platform",
    "MPS": "twinkle.platform",
    "find_node_ip": "twinkle.platform",
    "find_free_port": "twinkle.platform",
    "get_logger": "twinkle.logging",
    "exists": "twinkle.requirements",
    "requires": "twinkle.requirements",
    "Plugin": "twinkle.plugin",
    "trust_remote_code": "twinkle.trust",
    "check_unsafe": "twinkle.trust",
    "registry": "twinkle._registry",
    "Run": "twinkle.run",
    "TwinkleError": "twinkle.errors",
}
_CLIENT = ("init_tinker_client", "init_twinkle_client")

# Without the names of _CLIENT: `from twinkle import *` must not need twinkle-client.
__all__ = [*sorted(_WHERE), "__release_datetime__", "__version__"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _CLIENT:
        value = _client(name)
    else:
        raise AttributeError(f"module 'twinkle' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def _client(name: str) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module("twinkle_client"), name)
    except ModuleNotFoundError as error:
        if error.name != "twinkle_client":
            raise
        from twinkle.errors import RequirementMissing

        raise RequirementMissing(
            f"twinkle.{name} belongs to twinkle-client, which is not available yet in this version"
        ) from error


def __dir__() -> list[str]:
    return [*__all__, *_CLIENT]


if TYPE_CHECKING:
    from twinkle._registry import registry as registry
    from twinkle.errors import TwinkleError as TwinkleError
    from twinkle.logging import get_logger as get_logger
    from twinkle.mesh import DeviceGroup as DeviceGroup
    from twinkle.mesh import DeviceMesh as DeviceMesh
    from twinkle.platform import CPU as CPU
    from twinkle.platform import GPU as GPU
    from twinkle.platform import MPS as MPS
    from twinkle.platform import NPU as NPU
    from twinkle.platform import Platform as Platform
    from twinkle.platform import find_free_port as find_free_port
    from twinkle.platform import find_node_ip as find_node_ip
    from twinkle.plugin import Plugin as Plugin
    from twinkle.requirements import exists as exists
    from twinkle.requirements import requires as requires
    from twinkle.run import Run as Run
    from twinkle.runtime import get_device_placement as get_device_placement
    from twinkle.runtime import initialize as initialize
    from twinkle.runtime import is_master as is_master
    from twinkle.runtime import remote_class as remote_class
    from twinkle.runtime import remote_function as remote_function
    from twinkle.trust import check_unsafe as check_unsafe
    from twinkle.trust import trust_remote_code as trust_remote_code

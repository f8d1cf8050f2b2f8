# Written by `twinkle plugins types`; do not edit.
"""The service: `launch_server` and `ServerLauncher`, which the package twinkle-server offers."""

from twinkle._registry import lazy_names

__all__: list[str] = []


from twinkle_server.launch.config import ServerConfig as ServerConfig
from twinkle_server.launch.launcher import ServerLauncher as ServerLauncher
from twinkle_server.launch.launcher import launch_server as launch_server

# Written by `twinkle plugins types`; do not edit.
"""The published namespace of the service; plugins such as twinkle-server and twinkle-client fill it."""

from twinkle._registry import lazy_names

__all__: list[str] = []


from twinkle_server.launch.config import ServerConfig as ServerConfig
from twinkle_server.launch.launcher import ServerLauncher as ServerLauncher
from twinkle_server.launch.launcher import launch_server as launch_server

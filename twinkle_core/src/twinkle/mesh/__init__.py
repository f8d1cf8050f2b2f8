"""Device meshes: how ranks are laid out along parallel dimensions, and which part of a batch each rank gets."""

from twinkle.mesh.group import DeviceGroup
from twinkle.mesh.layout import DeviceMesh

__all__ = ["DeviceGroup", "DeviceMesh"]

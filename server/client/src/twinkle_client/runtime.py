"""The runtime `http`: models, samplers, data sets and loaders of a script live on a service."""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from twinkle.errors import ArgumentError, MeshError, TrainingStateError, Unsupported
from twinkle.logging import get_logger
from twinkle.mesh import DeviceGroup, DeviceMesh
from twinkle.platform import seed_everything
from twinkle.runtime import Runtime, RuntimeOptions

if TYPE_CHECKING:
    from twinkle_client.data import Client

_PLACING: Final = ("remote_group", "instance_id", "device_mesh")
"""Arguments that place components on devices; a service does that itself."""
_MODELS: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("model", "MultiLoraTransformersModel"): ("twinkle_client.model", "MultiLoraTransformersModel"),
    ("model", "TransformersModel"): ("twinkle_client.full_model", "TransformersModel"),
    ("sampler", "vLLMSampler"): ("twinkle_client.sampler", "vLLMSampler"),
    ("sampler", "TorchSampler"): ("twinkle_client.sampler", "TorchSampler"),
    ("dataset", "Dataset"): ("twinkle_client.dataset", "Dataset"),
    ("dataset", "LazyDataset"): ("twinkle_client.dataset", "LazyDataset"),
    ("dataset", "IterableDataset"): ("twinkle_client.dataset", "IterableDataset"),
    ("dataset", "PackingDataset"): ("twinkle_client.dataset", "PackingDataset"),
    ("dataset", "IterablePackingDataset"): ("twinkle_client.dataset", "IterablePackingDataset"),
    ("dataloader", "DataLoader"): ("twinkle_client.dataloader", "DataLoader"),
}
"""Class of the client by kind and name of the component."""
_HOW_TO_SERVE: Final = (
    "serve with twinkle.server.launch_server(config_path='server_config.yaml'), whose `applications:` choose the "
    "model, or with the command `twinkle serve MODEL`"
)
_KINDS: Final = ("model", "sampler", "dataset", "dataloader")
"""Kinds whose components live on the service; all others live in this process."""


class HttpRuntime(Runtime):
    """Builds the client's class in place of each model, sampler, data set and loader.

    Everything else, such as templates and rewards, lives in this process. Arguments that choose devices have no effect
    here: the service has its own.

    Without an address, the script is that of a server: it goes on with `twinkle.server.launch_server`, and components
    cannot be built in it.

    Args:
        base_url: address of the service; by default `TWINKLE_SERVER_URL`.
        api_key: key of the tenant; by default `TWINKLE_SERVER_TOKEN`.
        client: a client to use instead of a new one; it is not closed at the end.

    Raises:
        ArgumentError: both a client and an address or a key are given.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, client: "Client | None" = None
    ) -> None:
        if client is not None and (base_url or api_key):
            raise ArgumentError("client= has its own address and key; leave base_url= and api_key= out")
        self._base_url, self._api_key, self._given = base_url, api_key, client
        self._client: Any = None

    def initialize(self, options: RuntimeOptions) -> None:
        """Connect to the service and begin a session, unless that was done before.

        Raises:
            TwinkleClientError: the service cannot be reached, or refuses the key.
            MeshError: the mesh has several ranks; or the script is that of a server, and a group has several.
        """
        mesh = options.global_device_mesh or DeviceMesh.from_sizes(dp_size=1)
        if mesh.world_size != 1:
            raise MeshError(
                f"the global mesh has {mesh} ranks, but with mode='http' the script is one process, and the service "
                "divides the work over its own devices; leave global_device_mesh out"
            )
        if self._serves():
            _check_one_device(options.groups)
            get_logger().info("mode='http' without an address: %s", _HOW_TO_SERVE)
        elif self._client is None:
            self._client = self._given or self._connected()
        seed_everything(options.seed, options.full_determinism)
        self.mesh, self.options = mesh, options

    def _serves(self) -> bool:
        """Return whether there is no address, as in the published script of a server."""
        address = self._base_url or os.environ.get("TWINKLE_SERVER_URL", "").strip()
        return self._client is None and self._given is None and not address

    def _connected(self) -> Any:
        return importlib.import_module("twinkle_client").init_twinkle_client(self._base_url, self._api_key)

    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the client's object for a component of the service, or None to build it in this process.

        Raises:
            Unsupported: the service cannot run this class.
            TrainingStateError: the runtime has no address of a service.
        """
        found = _component_of(cls)
        if self.mesh is None or found is None:
            return None
        if self._client is None:
            raise TrainingStateError(
                f"mode='http' cannot build the {found[0]} {found[1]}: there is no address of a service. To use one, "
                "pass base_url= to initialize, or set TWINKLE_SERVER_URL; a script that serves builds no components: "
                f"{_HOW_TO_SERVE}"
            )
        if found not in _MODELS:
            known = ", ".join(name for kind, name in _MODELS if kind == found[0])
            raise Unsupported(f"mode='http' cannot run the {found[0]} {found[1]} on the service; use one of {known}")
        module, name = _MODELS[found]
        given = {key: value for key, value in kwargs.items() if key not in _PLACING}
        if found[0] != "dataloader":  # which has the client of its data set
            given["client"] = self._client
        return getattr(importlib.import_module(module), name)(*args, **given)

    def placement(self, groups: Sequence[DeviceGroup] = ()) -> str:
        """Return where components live."""
        own = "".join(f"; group {group.name!r} has no effect" for group in groups)
        if self._client is None:
            return f"http: nothing in this process; {_HOW_TO_SERVE}{own}"
        where = self._client.connection.base_url
        return f"http: {', '.join(_KINDS)} on {where}; everything else in this process{own}"

    def shutdown(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None and client is not self._given:
            client.close()


def _check_one_device(groups: Sequence[DeviceGroup]) -> None:
    """Check that the groups of a server's script are of one device each, which is what a service has.

    Raises:
        MeshError: a group has several.
    """
    for group in groups:
        if group.world_size != 1:
            raise MeshError(
                f"group {group.name!r} has {group.world_size} ranks, but a service trains and samples on one device; "
                "write ranks=1, or start one service for each device"
            )


def _component_of(cls: type) -> tuple[str, str] | None:
    """Return kind and name of the component that is a class of the kinds of a service; None for any other class.

    Raises:
        Unsupported: the class derives from one, and only this process has it.
    """
    from twinkle import registry

    references = {f"{base.__module__}:{base.__qualname__}": base for base in cls.__mro__}
    for kind in _KINDS:
        for specs in registry().specs(kind).values():
            for spec in specs:
                base = references.get(spec.ref)
                if base is cls:
                    return kind, spec.name
    for kind in _KINDS:
        for specs in registry().specs(kind).values():
            if any(spec.ref in references for spec in specs):
                raise Unsupported(
                    f"mode='http' cannot run {cls.__qualname__} on the service, which does not have this class; use "
                    f"the {kind} that it derives from"
                )
    return None

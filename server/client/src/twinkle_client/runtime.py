"""The runtime `http`: models, samplers, data sets and loaders of a script live on a service."""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from twinkle.errors import ArgumentError, MeshError, Unsupported
from twinkle.mesh import DeviceGroup, DeviceMesh
from twinkle.platform import seed_everything
from twinkle.runtime import Runtime, RuntimeOptions

if TYPE_CHECKING:
    from twinkle_client.data import Client

_PLACING: Final = ("remote_group", "instance_id", "device_mesh")
"""Arguments that place components on devices; a service does that itself."""
_MODELS: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("model", "MultiLoraTransformersModel"): ("twinkle_client.model", "MultiLoraTransformersModel"),
    ("model", "TransformersModel"): ("twinkle_client.model", "MultiLoraTransformersModel"),
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
_KINDS: Final = ("model", "sampler", "dataset", "dataloader")
"""Kinds whose components live on the service; all others live in this process."""


class HttpRuntime(Runtime):
    """Builds the client's class in place of each model, sampler, data set and loader.

    Everything else, such as templates and rewards, lives in this process. Arguments that choose devices have no effect
    here: the service has its own.

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
            MeshError: the mesh has several ranks.
        """
        mesh = options.global_device_mesh or DeviceMesh.from_sizes(dp_size=1)
        if mesh.world_size != 1:
            raise MeshError(
                f"the global mesh has {mesh} ranks, but with mode='http' the script is one process, and the service "
                "divides the work over its own devices; leave global_device_mesh out"
            )
        if self._client is None:
            self._client = self._given or self._connected()
        seed_everything(options.seed, options.full_determinism)
        self.mesh, self.options = mesh, options

    def _connected(self) -> Any:
        return importlib.import_module("twinkle_client").init_twinkle_client(self._base_url, self._api_key)

    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the client's object for a component of the service, or None to build it in this process.

        Raises:
            Unsupported: the service cannot run this class.
        """
        found = _component_of(cls)
        if self._client is None or found is None:
            return None
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
        where = "a service" if self._client is None else self._client.connection.base_url
        own = "".join(f"; group {group.name!r} has no effect" for group in groups)
        return f"http: {', '.join(_KINDS)} on {where}; everything else in this process{own}"

    def shutdown(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None and client is not self._given:
            client.close()


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

"""The module that a sampler runs: its own weights, or a live model that is being trained."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.hub import local_folder
from twinkle.logging import get_logger
from twinkle_torch.numerics import evaluating
from twinkle_transformers import adapters
from twinkle_transformers.adapters import tuned_places
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.loading import load_model
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.sampling.adapters import LiveAdapters, Spare, read_version, sites_of
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sites import Site, find_expert_sites, install_experts

_KEPT = 4  # number of adapters from folders to keep loaded; a training loop writes a new one each step


@dataclass(frozen=True, slots=True)
class Pick:
    """The adapter of a row.

    Attributes:
        peft: its name in PEFT, "" for the base model, None for PEFT's present state; for the decode loop.
        version: its present weights, None for the base model; for the engine.
        whole: whether the engine cannot serve it.
    """

    peft: str | None = ""
    version: AdapterVersion | None = None
    whole: bool = False


class Source(ABC):
    """A module to sample from, and its adapters."""

    def __init__(self) -> None:
        self._lock = RLock()

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module to call: the Hugging Face model, or PEFT's wrapper around it."""

    @property
    def unchecked(self) -> nn.Module:
        """The module without its checks, which can cost more than a step; for calls that have made them."""
        return self.module

    @property
    @abstractmethod
    def model_id(self) -> str | None:
        """Folder of the tokenizer, if known."""

    @abstractmethod
    def pick(self, name: str | None, path: str | Path | None, runner: Runner | None) -> Pick:
        """Return the adapter of a row.

        Args:
            name: its name; "" is the default adapter, None the base model.
            path: its folder, instead of a name.
            runner: runner of the engine; None without an engine.
        """

    def pick_version(self, version: AdapterVersion, runner: Runner | None) -> Pick:
        """Return an adapter version as the adapter of a row.

        Raises:
            ArgumentError: it adapts layers that this model does not have.
            Unsupported: it adapts experts whose forward was replaced.
        """
        sites = self.sites(runner)
        shapes = version.layout.shapes.items()
        experts = find_expert_sites(self.base) if any(shape.experts for _, shape in shapes) else {}
        if strange := [name for name, shape in shapes if name not in (experts if shape.experts else sites)]:
            raise ArgumentError(f"adapter {version.key!r} adapts {strange[0]}, which this model does not have")
        install_experts(experts[name] for name, shape in shapes if shape.experts)
        return Pick(version=version, whole=runner is None)

    @abstractmethod
    def add(self, adapter_name: str, path: str | Path, runner: Runner | None) -> None:
        """Load an adapter under a name, and replace one of that name."""

    def read(self, path: str | Path, runner: Runner | None) -> AdapterVersion:
        """Read the adapter in a folder, without changing the module.

        Raises:
            CheckpointError: the folder has no adapter, or one of another model.
            Unsupported: the adapter is not only low-rank terms of linear layers.
        """
        return read_version(_adapter_folder(path), self.sites(runner))

    def sites(self, runner: Runner | None) -> dict[str, Site]:
        """Return the layers that adapters may adapt."""
        return sites_of(self.base) if runner is None else runner.sites

    @property
    def base(self) -> Any:
        """The Hugging Face model itself."""
        module = self.unchecked
        return module.get_base_model() if isinstance(module, PeftModel) else module

    @property
    def backbone(self) -> Backbone | None:
        """The module as body and head, if a live model has measured it."""
        return None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forwards run."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def ready(self, adapter: str | None) -> Iterator[nn.Module]:
        """Yield the module in evaluation mode, without gradients, with the adapter active; restore all at the end."""
        module = self.module
        with self._lock, evaluating(module), torch.no_grad(), self.autocast(), with_adapter(module, adapter):
            yield module

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Prepare the module for the engine: like `ready`, with PEFT's adapters disabled."""
        module = self.unchecked
        with self._lock, evaluating(module), self.without_graph(), self.autocast(), silent(module):
            yield

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that prevents other use of the module."""
        return self._lock

    def without_graph(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context without gradients; a module that is trained must not get inference tensors."""
        return torch.no_grad()


class OwnWeights(Source):
    """A module that only this sampler uses, with adapters from folders."""

    def __init__(self, model_id: str | Path, *, adapter_path: str | Path | None, **options: Any) -> None:
        """Load the model, and the default adapter if given.

        Args:
            model_id: see `load_model`.
            adapter_path: the folder of a PEFT adapter.
            **options: arguments of `load_model`.
        """
        super().__init__()
        self._module: nn.Module
        self._module, folder = load_model(model_id, **options)
        self._model_id = str(folder)
        self._module.requires_grad_(False)
        self._named: dict[str, Pick] = {}
        self._by_path: dict[tuple[str, int, int], Pick] = {}
        self._count = 0
        self.spare = Spare()
        self._default = None if adapter_path is None else _adapter_folder(adapter_path)
        if self._default is not None:
            adapters.read_config(self._default)

    @property
    def module(self) -> nn.Module:
        """The module to call."""
        return self._module

    @property
    def model_id(self) -> str:
        """The local folder of the weights."""
        return self._model_id

    def without_graph(self) -> contextlib.AbstractContextManager[Any]:
        """See `Source.without_graph`; these weights are not trained."""
        return torch.inference_mode()

    def pick(self, name: str | None, path: str | Path | None, runner: Runner | None) -> Pick:
        """See `Source.pick`; a folder is read again only if it has changed."""
        if path is not None:
            return self._from_path(path, runner)
        if name is None:
            return Pick()
        if name and name not in self._named:
            raise _unknown(name, set(self._named) - {""}, "load it with add_adapter_to_sampler(name, path)")
        if not name and "" not in self._named and self._default is not None:
            self._named[""] = self._load(self._default, runner)
        return self._named.get(name, Pick())

    def add(self, adapter_name: str, path: str | Path, runner: Runner | None) -> None:
        """See `Source.add`; a replaced adapter is removed after the new one was loaded."""
        if not adapter_name:
            raise ArgumentError("add_adapter_to_sampler: the adapter's name is empty; give it one")
        old = self._named.get(adapter_name)
        self._named[adapter_name] = self._load(_adapter_folder(path), runner)
        if old is not None:
            self._drop(old)

    def set_default(self, version: AdapterVersion | None, name: str | None) -> None:
        """Set the default adapter of rows, also available by its name if it has one; None means the base model."""
        self._default = None
        for key in {"", name or ""}:
            old = self._named.pop(key, None)
            if version is not None or not key:
                self._named[key] = Pick(version=version)
            if old is not None:
                self._drop(old)

    def _from_path(self, path: str | Path, runner: Runner | None) -> Pick:
        folder = _adapter_folder(path)
        key = _state(folder)
        found = self._by_path.pop(key, None) or self._load(folder, runner)
        self._by_path[key] = found
        while len(self._by_path) > _KEPT:
            self._drop(self._by_path.pop(next(iter(self._by_path))))
        return found

    def _load(self, folder: Path, runner: Runner | None) -> Pick:
        """Read an adapter for the engine, or load it into PEFT under an internal name."""
        if runner is not None:
            try:
                return Pick(version=read_version(folder, runner.sites))
            except Unsupported as error:
                get_logger().info("%s; it is sampled with alone, by the slower path", error)
        self._count += 1
        name = f"sampler_{self._count}"
        self._module, _ = adapters.add_adapter(self._module, name, folder)
        return Pick(name, whole=True)

    def _drop(self, pick: Pick) -> None:
        module: Any = self._module
        if pick.peft:
            module.delete_adapter(pick.peft)


class SharedModel(Source):
    """The module of a live model, or a bare module; it is not copied, and changes to it are undone."""

    def __init__(self, model: Any) -> None:
        """Store the model; its module is looked up at each call, because adding an adapter wraps it again.

        Args:
            model: an `nn.Module`, or anything with one as `.model`.

        Raises:
            ArgumentError: `model` is neither.
        """
        super().__init__()
        if not isinstance(model, nn.Module) and not isinstance(getattr(model, "model", None), nn.Module):
            raise ArgumentError(
                f"model is a {type(model).__name__}; give a TransformersModel, or a module of transformers or PEFT"
            )
        self._model = model
        self._live = LiveAdapters()
        self._folders = _Folders()
        self._published: dict[str, Pick] = {}

    @property
    def module(self) -> nn.Module:
        """The module to call."""
        module = self.unchecked
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise Unsupported(
                "the parameters of this model lie in shards on several ranks, which generation does not gather; "
                "save it and sample from the folder, or use a mesh without fsdp"
            )
        if not hasattr(module, "get_input_embeddings"):
            raise ArgumentError(f"model holds a {type(module).__name__}, which is not a language model of transformers")
        return module

    @property
    def unchecked(self) -> nn.Module:
        """See `Source.unchecked`."""
        module: Any = self._model if isinstance(self._model, nn.Module) else self._model.model
        while isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        return module  # type: ignore[no-any-return]

    @property
    def model_id(self) -> str | None:
        """The folder or id of the live model, if it has one."""
        if isinstance(self._model, nn.Module):
            return None
        found = (
            getattr(self._model, "tokenizer_path", None)
            or getattr(self._model, "model_path", None)
            or getattr(self._model, "model_id", None)
        )
        return None if found is None else str(found)

    @property
    def backbone(self) -> Backbone | None:
        """See `Source.backbone`."""
        found: Backbone | None = getattr(self._model, "backbone", None)
        return found if found is not None and found.model is self.base else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the live model's own autocast, so that sampling computes what training computes."""
        own = getattr(self._model, "autocast", None)
        return own() if own is not None and not isinstance(self._model, nn.Module) else contextlib.nullcontext()

    def pick(self, name: str | None, path: str | Path | None, runner: Runner | None) -> Pick:
        """See `Source.pick`; by default it is the live model's active adapter. A folder is read, not added."""
        if path is not None:
            return Pick(version=self._folders.version(path, lambda: self.read(path, runner)), whole=runner is None)
        if name is None:
            return Pick()
        if name in self._published:
            return self._published[name]
        if hasattr(self._model, "sampler_version"):
            return self._of_pool(name, runner)
        module = self.module
        known = set(module.peft_config) if isinstance(module, PeftModel) else set()
        if name and name not in known:
            raise _unknown(name, known, "add it to the model with add_adapter_to_model")
        if not isinstance(module, PeftModel):
            return Pick(None, whole=has_adapters(module))
        active = active_adapters(module)
        wanted = name or (active[0] if len(active) == 1 else "")
        if not wanted and not active:
            return Pick(None)
        if wanted and runner is not None:
            try:
                return Pick(name or None, self._live.version(module, wanted))
            except Unsupported as error:
                get_logger().info("%s; it is sampled with alone, by the slower path", error)
        return Pick(name or None, whole=True)

    def publish(self, name: str | None, runner: Runner | None) -> None:
        """Store the present state of an adapter, for rows that name it and for rows without a name.

        Args:
            name: name of the adapter; None means the active one.
            runner: see `pick`.
        """
        if hasattr(self._model, "sampler_version"):
            found = self._of_pool(name or "", runner)
        else:
            module = self.module
            name = getattr(self._model, "active_group", None) if name is None else name
            if not isinstance(module, PeftModel):
                if name or has_adapters(module):
                    raise _unknown(name or "", set(), "add it to the model with add_adapter_to_model")
                return
            active = active_adapters(module)
            name = name or (active[0] if len(active) == 1 else "")
            if name not in module.peft_config:
                raise _unknown(name, set(module.peft_config), "name one of the model's")
            found = Pick(version=self._frozen(module, name), whole=runner is None)
        self._published |= {"": found, name or "": found}

    def _frozen(self, module: PeftModel, name: str) -> AdapterVersion:
        try:
            return self._live.version(module, name)
        except Unsupported as error:
            raise Unsupported(
                f"{error}: it cannot be published beside the weights that it shares; give the sampler weights of its "
                "own (model_id=), into which it is merged, or do not sync, and the sampler follows the live adapter"
            ) from error

    def _of_pool(self, name: str, runner: Runner | None) -> Pick:
        if not name:
            raise ArgumentError(
                "sample: adapter_name is required where many adapters share a model: a name, or None for the base "
                "model; or one for each input"
            )
        return Pick(version=self._model.sampler_version(name), whole=runner is None)

    def add(self, adapter_name: str, path: str | Path, runner: Runner | None) -> None:
        """Raise: the adapters of a live model belong to that model."""
        raise Unsupported(_SHARED)


class _Folders:
    """Adapters of the most recently read folders; a changed folder is read again."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, int, int], AdapterVersion] = {}

    def version(self, path: str | Path, read: Callable[[], AdapterVersion]) -> AdapterVersion:
        """Return the adapter in a folder, from the cache or by `read`."""
        key = _state(_adapter_folder(path))
        found = self._versions.pop(key, None) or read()
        self._versions[key] = found
        if len(self._versions) > _KEPT:
            del self._versions[next(iter(self._versions))]
        return found


def _state(folder: Path) -> tuple[str, int, int]:
    """Return an identity of the adapter in a folder, which changes when the folder is rewritten."""
    weights = folder / adapters.WEIGHTS
    stat = weights.stat() if weights.is_file() else None
    return str(folder.resolve()), 0 if stat is None else stat.st_mtime_ns, 0 if stat is None else stat.st_ino


_SHARED = (
    "this sampler shares the module of a live model, so an adapter cannot be loaded into it; add it to the model "
    "(add_adapter_to_model), or make a sampler with weights of its own (model_id=)"
)


def _adapter_folder(path: str | Path) -> Path:
    folder = local_folder(path)
    if not folder.is_dir():
        raise CheckpointError(f"no adapter at {folder}: there is no such folder")
    return folder


def _unknown(name: str, known: set[str], way: str) -> ArgumentError:
    from twinkle_registry import nearest

    near = nearest(name, known) or sorted(known)
    there = f"nearest: {', '.join(near)}" if near else "there are none"
    return ArgumentError(f"adapter {name!r} is unknown; {there}; {way}")


@contextmanager
def with_adapter(module: nn.Module, adapter: str | None) -> Iterator[None]:
    """Activate one adapter ("": none) for a block. PEFT's switches also change `requires_grad`, which is restored."""
    if adapter is None or not isinstance(module, PeftModel):
        yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    tuner: Any = module.base_model
    active, shown = list(tuner.active_adapters), module.active_adapter
    try:
        if adapter == "":
            with module.disable_adapter():
                yield
        else:
            module.set_adapter(adapter)
            yield
    finally:
        tuner.set_adapter(active)
        module.active_adapter = shown
        for parameter, wanted in flags:
            parameter.requires_grad_(wanted)


@contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """Disable PEFT's adapters for a block, without changing `requires_grad`."""
    if not isinstance(module, PeftModel):
        yield
        return
    layers: list[Any] = [part for _, part in tuned_places(module.get_base_model())]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def active_adapters(module: PeftModel) -> list[str]:
    """Return the active adapters."""
    tuner: Any = module.base_model
    layers = (part for _, part in tuned_places(module.get_base_model()) if isinstance(part, BaseTunerLayer))
    silent = any(part.disable_adapters for part in layers)
    return [] if silent else list(tuner.active_adapters)


def has_adapters(module: nn.Module) -> bool:
    """Return whether the module contains layers of PEFT."""
    return any(isinstance(part, BaseTunerLayer) for part in module.modules())

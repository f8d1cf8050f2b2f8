"""Where a sampler's module comes from: weights of its own, or a live model that is being trained."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.hub import local_folder
from twinkle_transformers import adapters
from twinkle_transformers.loading import load_model

_KEPT = 4  # adapters given by path that stay loaded; a training loop writes a new one each step


class Source(ABC):
    """A module to sample from, and its adapters."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module to call: the Hugging Face model, or PEFT's wrapper around it."""

    @property
    @abstractmethod
    def model_id(self) -> str | None:
        """Where the tokenizer is, if that is known."""

    @abstractmethod
    def choose(self, adapter_name: str, adapter_path: str | Path | None, use_base_model: bool) -> str | None:
        """Return the adapter that a call wants: its name, "" for the base model alone, None to leave all as it is."""

    @abstractmethod
    def add(self, adapter_name: str, path: str | Path) -> None:
        """Load an adapter under a name; one of that name is replaced."""

    @property
    def base(self) -> Any:
        """The Hugging Face model itself."""
        module = self.module
        return module.get_base_model() if isinstance(module, PeftModel) else module

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forwards run."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def ready(self, adapter: str | None) -> Iterator[nn.Module]:
        """Give the module in evaluation mode, without gradients, the adapter chosen; all of it undone at the end."""
        module = self.module
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            with torch.no_grad(), self.autocast(), _with_adapter(module, adapter):
                yield module
        finally:
            for part, training in modes:
                part.training = training


class OwnWeights(Source):
    """A module that only this sampler uses; adapters come from folders."""

    def __init__(self, model_id: str | Path, *, adapter_path: str | Path | None, **options: Any) -> None:
        """Load the model and, where given, the adapter that calls use by default.

        Args:
            model_id: see `load_model`.
            adapter_path: the folder of a PEFT adapter.
            **options: for `load_model`.
        """
        self._module: nn.Module
        self._module, folder = load_model(model_id, **options)
        self._model_id = str(folder)
        self._module.requires_grad_(False)
        self._named: dict[str, str] = {}
        self._by_path: dict[tuple[str, int], str] = {}
        self._count = 0
        if adapter_path is not None:
            self._named[""] = self._load(_adapter_folder(adapter_path))

    @property
    def module(self) -> nn.Module:
        """The module to call."""
        return self._module

    @property
    def model_id(self) -> str:
        """The local folder of the weights."""
        return self._model_id

    def choose(self, adapter_name: str, adapter_path: str | Path | None, use_base_model: bool) -> str | None:
        """See `Source.choose`; a path is loaded unless it is still there unchanged."""
        if use_base_model:
            return ""
        if adapter_path is not None:
            if adapter_name:
                raise ArgumentError("sample: give adapter_name or adapter_path, not both")
            return self._from_path(adapter_path)
        if adapter_name and adapter_name not in self._named:
            known = {name for name in self._named if name}
            raise _unknown(adapter_name, known, "load it with add_adapter_to_sampler(name, path)")
        return self._named.get(adapter_name, "")

    def add(self, adapter_name: str, path: str | Path) -> None:
        """See `Source.add`; the one that it replaces goes when the new one is in place."""
        if not adapter_name:
            raise ArgumentError("add_adapter_to_sampler: the adapter's name is empty; give it one")
        old = self._named.get(adapter_name)
        self._named[adapter_name] = self._load(_adapter_folder(path))
        if old is not None:
            self._drop(old)

    def _from_path(self, path: str | Path) -> str:
        folder = _adapter_folder(path)
        weights = folder / adapters.WEIGHTS
        key = (str(folder.resolve()), weights.stat().st_mtime_ns if weights.is_file() else 0)
        if key not in self._by_path:
            self._by_path[key] = self._load(folder)
            while len(self._by_path) > _KEPT:
                self._drop(self._by_path.pop(next(iter(self._by_path))))
        return self._by_path[key]

    def _load(self, folder: Path) -> str:
        """Load an adapter under a name that PEFT alone sees."""
        self._count += 1
        name = f"sampler_{self._count}"
        self._module, _ = adapters.add_adapter(self._module, name, folder)
        return name

    def _drop(self, name: str) -> None:
        module: Any = self._module
        module.delete_adapter(name)


class SharedModel(Source):
    """The module of a live model, or a bare module: nothing is copied, and nothing of it is changed for good."""

    def __init__(self, model: Any) -> None:
        """Remember the model; its module is looked up at each call, since adding an adapter wraps it anew.

        Args:
            model: an `nn.Module`, or anything with one as `.model`.

        Raises:
            ArgumentError: it is neither.
        """
        if not isinstance(model, nn.Module) and not isinstance(getattr(model, "model", None), nn.Module):
            raise ArgumentError(
                f"model is a {type(model).__name__}; give a TransformersModel, or a module of transformers or PEFT"
            )
        self._model = model

    @property
    def module(self) -> nn.Module:
        """The module to call."""
        module: Any = self._model if isinstance(self._model, nn.Module) else self._model.model
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise Unsupported(
                "the parameters of this model lie in shards on several ranks, which generation does not gather; "
                "save it and sample from the folder, or use a mesh without fsdp"
            )
        while isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        if not hasattr(module, "get_input_embeddings"):
            raise ArgumentError(f"model holds a {type(module).__name__}, which is no language model of transformers")
        return module  # type: ignore[no-any-return]

    @property
    def model_id(self) -> str | None:
        """The folder or id that the live model was loaded from, if it says so."""
        if isinstance(self._model, nn.Module):
            return None
        found = getattr(self._model, "model_path", None) or getattr(self._model, "model_id", None)
        return None if found is None else str(found)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the live model's own autocast, so that sampling computes what training computes."""
        own = getattr(self._model, "autocast", None)
        return own() if own is not None and not isinstance(self._model, nn.Module) else contextlib.nullcontext()

    def choose(self, adapter_name: str, adapter_path: str | Path | None, use_base_model: bool) -> str | None:
        """See `Source.choose`; without a name the live model's active adapter stays active."""
        if adapter_path is not None:
            raise Unsupported(_SHARED)
        if use_base_model:
            return ""
        module = self.module
        known = set(module.peft_config) if isinstance(module, PeftModel) else set()
        if adapter_name and adapter_name not in known:
            raise _unknown(adapter_name, known, "add it to the model with add_adapter_to_model")
        return adapter_name or None

    def add(self, adapter_name: str, path: str | Path) -> None:
        """Refuse: the adapters of a live model are its own."""
        raise Unsupported(_SHARED)


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


@contextlib.contextmanager
def _with_adapter(module: nn.Module, adapter: str | None) -> Iterator[None]:
    """Let one adapter ("": none) answer for the duration of a block. PEFT's switches also change `requires_grad`."""
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

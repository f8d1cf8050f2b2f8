"""What a script passes to the data loader: checked, and brought into the form that the loader works with."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from twinkle.dataset.protocol import DatasetLike, StreamLike
from twinkle.errors import ArgumentError, ComponentTypeError, Unsupported
from twinkle_data.dataloader.stream import PlainStream

_OURS = {
    "sampler": "the order is a function of seed and epoch, so that it can be resumed; use shuffle= and seed=, or order "
    "the rows in the data set",
    "batch_sampler": "the order is a function of seed and epoch, so that it can be resumed; use shuffle= and seed=, or "
    "order the rows in the data set",
}


def rows_of(dataset: Any) -> DatasetLike | StreamLike:
    """Return the data set or stream that `dataset` is, or that it returns if it is a function.

    Raises:
        ComponentTypeError: it has rows neither by number nor one after the other, or can be read only once.
    """
    if not isinstance(dataset, DatasetLike | StreamLike | Iterable) and callable(dataset):
        dataset = dataset()
    if isinstance(dataset, StreamLike):
        return dataset
    if isinstance(dataset, DatasetLike) and not _is_torch_stream(dataset):
        return dataset
    if isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        once = ", which can be read only once" if isinstance(dataset, Iterator) else ""
        raise ComponentTypeError(
            f"dataset is a {type(dataset).__name__}{once}; a data loader needs rows by number: __getitem__ and "
            "__len__, or a stream that can be read again: IterableDataset(DatasetMeta(data=function))"
        )
    if type(dataset).__module__.split(".")[0] == "datasets":
        from twinkle.dataset.meta import DatasetMeta
        from twinkle_data.dataset.iterable import IterableDataset

        return IterableDataset(DatasetMeta("stream", data=dataset))
    return PlainStream(dataset)


def torch_options(kwargs: Mapping[str, Any], own: Iterable[str], stream: Any) -> dict[str, Any]:
    """Return the keywords for torch's loader.

    Args:
        kwargs: what no parameter of the loader took.
        own: the parameters of the loader.
        stream: the stream that will be read, or None for rows by number.

    Raises:
        ArgumentError: an unknown keyword, or one that would change the order of rows.
        Unsupported: one that a stream cannot honour.
    """
    if not kwargs:
        return {}
    import torch

    for name, why in _OURS.items():
        if name in kwargs:
            raise ArgumentError(f"DataLoader takes no {name!r}: {why}")
    if not kwargs.get("in_order", True):
        raise ArgumentError("DataLoader takes no in_order=False: batches would come in an order that nobody can resume")
    known = {*own, *inspect.signature(torch.utils.data.DataLoader).parameters} - set(_OURS)
    for name in kwargs:
        if name not in known:
            from twinkle_registry import nearest

            close = nearest(name, known, 1)
            hint = f", nearest: {close[0]!r}" if close else ""
            raise ArgumentError(f"DataLoader has no argument {name!r}{hint}; it takes {', '.join(sorted(known))}")
    if stream is not None:
        _check_stream(kwargs, stream)
    return dict(kwargs)


def processor_of(x: Any, kwargs: Mapping[str, Any], mesh: Any) -> Callable[[list[Any]], Any]:
    """Return the processor that `x` names, is, or builds with `kwargs`.

    Raises:
        ComponentTypeError: it is none.
        ArgumentError: its constructor does not take a keyword, or it is no class.
    """
    if not isinstance(x, str | type):
        if not callable(x):
            raise ComponentTypeError(f"processor_cls is a {type(x).__name__}; give a name, a class or a callable")
        if kwargs:
            raise ArgumentError(f"processor_cls is not a class, so {', '.join(map(repr, kwargs))} would be ignored")
        return x  # type: ignore[no-any-return]
    from twinkle._registry import registry

    found = registry().resolve(x, "processor")
    arguments = dict(kwargs)
    if mesh is not None and isinstance(found, type) and "device_mesh" in inspect.signature(found).parameters:
        arguments.setdefault("device_mesh", mesh)
    built: Callable[[list[Any]], Any] = registry().build(x, "processor", **arguments)
    return built


def at_least(name: str, value: Any, lowest: int) -> int:
    """Return a whole number from `lowest` on, or raise `ArgumentError`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < lowest:
        raise ArgumentError(f"{name} is {value!r}; give a whole number of at least {lowest}")
    return int(value.__index__())


def _is_torch_stream(dataset: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dataset, torch.utils.data.IterableDataset)


def _check_stream(kwargs: Mapping[str, Any], stream: Any) -> None:
    if kwargs.get("pin_memory"):
        raise Unsupported(
            "a stream's batches are made in this process, where pin_memory=True has no effect; leave it out"
        )
    if kwargs.get("num_workers", 0) and getattr(stream, "packing_num_proc", 1) > 1:
        raise ArgumentError(
            f"packing_num_proc={stream.packing_num_proc} starts processes, and so does "
            f"num_workers={kwargs['num_workers']}; give one of the two"
        )
    if isinstance(stream, PlainStream) and kwargs.get("num_workers", 0) > 1:
        raise Unsupported(
            f"num_workers={kwargs['num_workers']}: a {type(stream.rows).__name__} may divide its rows among workers by "
            "itself; use num_workers=1, or IterableDataset(DatasetMeta(data=...)) over rows that do not"
        )

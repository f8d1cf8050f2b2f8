"""State of adapters: taken from one and restored whole or not at all; on disk as safetensors and JSON, never pickle.

The pool keeps the matrices of an adapter in one vector, whose order and padding suit its device. In the file each
matrix has its own name, so that a snapshot can be restored by a pool that arranges them in another way.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twinkle.engine import AdapterSpec
from twinkle.errors import CheckpointError, TwinkleError
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.memory import host_copy
from twinkle_transformers.pool.files import shapes_in
from twinkle_transformers.pool.metric_state import PREFIX, check_metrics, put_metrics, take_metrics
from twinkle_transformers.pool.tenants import Tenant
from twinkle_transformers.training_state import (
    compare_optimizers,
    compare_schedulers,
    decode_state,
    encode_state,
    pack_optimizer,
    unpack_optimizer,
)

VERSION = 1
WEIGHTS, GRADIENT, OPTIMIZER = "weights", "gradient", "optimizer/"
_COUNTERS: dict[str, tuple[type, ...]] = {
    "cur_step": (int,), "updates": (int,), "scheduled": (int,), "pending": (int,), "skipped": (int,),
    "gradient_accumulation_steps": (int,), "denominator": (int, float), "loss_sum": (int, float),
    "last_loss": (int, float), "last_grad_norm": (int, float, type(None)), "seed": (int, type(None)),
    "divided": (bool,), "measured": (bool,), "stepped": (bool,), "dropped": (bool,),
}  # fmt: skip
_NOTHING_PENDING: dict[str, Any] = {
    "pending": 0, "denominator": 0.0, "loss_sum": 0.0, "skipped": 0, "divided": False, "measured": False,
    "stepped": False, "dropped": False,
}  # fmt: skip
_WHERE = "the snapshot"


def take_snapshot(tenant: Tenant, *, gradient: bool = True) -> dict[str, Any]:
    """Return a copy of an adapter's state, which later training does not change.

    Args:
        tenant: the adapter.
        gradient: False leaves out pending gradients, their counters, and what metrics have not seen yet.

    The snapshot contains neither components (template, processor, loss, metrics; only the state of these) nor the
    usage, nor the graph of a last `forward`.

    Returns:
        `tensors`: by name, in host memory: `weights` float32 `[P]`, `gradient` `[P]` if one is pending,
        `optimizer/<field>/<parameter>`, and `passes/...` that metrics have not seen; `state`: JSON data: shapes,
        counters, seed, optimizer, scheduler, metrics.

    Raises:
        CheckpointError: JSON cannot represent the state of the optimizer or scheduler.
    """
    tensors = {WEIGHTS: tenant.flat.detach()}
    if gradient and tenant.flat.grad is not None:
        tensors[GRADIENT] = tenant.flat.grad
    trained, state = take_training(tenant.group, tenant.parameters, gradient=gradient)
    state |= {
        "adapter": tenant.name,
        "rank_multiple": tenant.plan.layout.rank_multiple,
        "layout": _layout(tenant),
        "dropout": tenant.plan.dropout,
    }
    return {"tensors": {name: host_copy(tensor) for name, tensor in tensors.items()} | trained, "state": state}


def take_training(
    group: OptimizerGroup, parameters: Callable[[], Mapping[str, nn.Parameter]], *, gradient: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies of the tensors beside weights and gradients, in host memory, and the JSON data of a training state.

    Args:
        group: the training state.
        parameters: returns what its optimizer updates, by saved name; called if there is an optimizer.
        gradient: as for `take_snapshot`.

    Raises:
        CheckpointError: JSON cannot represent the state of the optimizer or scheduler.
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {
        "version": VERSION,
        "counters": {name: getattr(group, name) for name in _COUNTERS} | ({} if gradient else _NOTHING_PENDING),
        "optimizer": None,
        "scheduler": None,
    }
    if group.optimizer is not None:
        packed, state["optimizer"] = pack_optimizer(group.optimizer, parameters())
        state["optimizer"]["values"] = encode_state(state["optimizer"]["values"], state["optimizer"]["class"])
        tensors |= {OPTIMIZER + name: host_copy(tensor) for name, tensor in packed.items()}
    if (scheduler := group.lr_scheduler) is not None:
        name = type(scheduler).__name__
        state["scheduler"] = {"class": name, "state": encode_state(scheduler.state_dict(), name)}
    passes, state["metrics"] = take_metrics(group, unseen=gradient)
    return tensors | passes, state


def restore_snapshot(tenant: Tenant, snapshot: Mapping[str, Any]) -> None:
    """Replace the state of an adapter by a snapshot of it, or of an adapter with the same layout.

    A snapshot without an optimizer removes the adapter's; one with an optimizer (and scheduler) requires that the same
    classes are set, and restores their options. Metrics continue from the snapshot if the adapter has the same ones;
    otherwise the adapter's own start anew, unless passes wait for those of the snapshot.

    Raises:
        CheckpointError: it is damaged, or of another layout, dropout, optimizer or scheduler; nothing has changed.
    """
    tensors, state = _read(snapshot, ("rank_multiple", "layout", "dropout"))
    group = tenant.group
    _compare_shapes(tenant, state)
    _check_tensors(tenant, tensors)
    put_counters = put_optimizer(group, tenant.parameters, tensors, state)
    group.drop_passes()
    if group.optimizer is None:
        group.left_out = [tenant.flat]
    with torch.no_grad():
        tenant.flat.copy_(tensors[WEIGHTS])
    tenant.flat.grad = None
    if GRADIENT in tensors:
        tenant.add_gradient(tensors[GRADIENT].to(tenant.flat.device))
    put_counters()


def put_optimizer(
    group: OptimizerGroup, parameters: Callable[[], Mapping[str, nn.Parameter]], tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Callable[[], None]:  # fmt: skip
    """Replace optimizer and scheduler by what `take_training` returned.

    Returns:
        a function that replaces counters and metrics, to be called after weights and gradients were replaced.

    Raises:
        CheckpointError: the state is damaged, or of another optimizer or scheduler; nothing has changed.
    """
    counters = _counters(state)
    measured = _metrics(group, state)
    saved = state["optimizer"]
    if saved is not None:
        if group.optimizer is None:
            raise CheckpointError(
                f"{_WHERE} holds the state of {saved['class']}, and adapter {group.adapter_name!r} has no optimizer; "
                f"call set_optimizer({saved['class']!r}, ...) first"
            )
        with _undone_on_error(group):
            names = parameters()
            compare_optimizers(_WHERE, saved, group.optimizer, names)
            compare_schedulers(_WHERE, state["scheduler"], group.lr_scheduler)
            _put_optimizer(group, names, saved, state["scheduler"], tensors)
    else:
        group.optimizer, group.lr_scheduler = None, None

    def put_counters() -> None:
        for name, value in counters.items():
            setattr(group, name, value)
        if measured is not None:
            put_metrics(group, measured, tensors)

    return put_counters


def _metrics(group: OptimizerGroup, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state of the metrics if it can be restored; None if the snapshot has none, or that of others."""
    saved: Mapping[str, Any] | None = state.get("metrics")
    if saved is None:
        return None
    try:
        check_metrics(group, saved, _WHERE)
    except CheckpointError:
        if any(saved[name]["unseen"] for name in ("train", "eval")):
            raise
        return None
    return saved


def _layout(tenant: Tenant) -> list[list[Any]]:
    shapes = tenant.plan.layout.shapes.items()
    return [[name, s.rank, s.fan_in, s.fan_out, s.scale, s.experts] for name, s in shapes]


def _read(snapshot: Mapping[str, Any], further: Sequence[str] = ()) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return tensors and state of a snapshot, after checking that the state has its keys and the `further` ones."""
    tensors, state = (snapshot.get(key) if isinstance(snapshot, Mapping) else None for key in ("tensors", "state"))
    if not isinstance(tensors, Mapping) or not isinstance(state, Mapping):
        raise CheckpointError("a snapshot must be a dict of `tensors` and `state`, as returned by snapshot()")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{_WHERE} has version {state.get('version')!r}; this is {VERSION}")
    wanted = (*further, "counters", "optimizer", "scheduler")
    if missing := [key for key in wanted if key not in state]:
        raise CheckpointError(f"{_WHERE} has no {missing[0]!r}; it is damaged")
    if odd := [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]:
        raise CheckpointError(f"{_WHERE}: {odd[0]!r} is a {type(tensors[odd[0]]).__name__}, not a tensor")
    return tensors, state


def _compare_shapes(tenant: Tenant, state: Mapping[str, Any]) -> None:
    what = ("rank", "fan_in", "fan_out", "scale", "experts")
    own = {name: values for name, *values in _layout(tenant)}
    try:
        saved = {name: values for name, *values in state["layout"]}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{_WHERE} is damaged: its layout is not a list of shapes") from error
    for name in own | saved:
        if name not in own or name not in saved:
            has, lacks = (_WHERE, "the adapter") if name in saved else ("the adapter", _WHERE)
            raise CheckpointError(
                f"{_WHERE} is of another adapter than {tenant.name!r}: {has} adapts {name}, {lacks} not"
            )
        for field, here, there in zip_longest(what, own[name], saved[name]):
            if here != there:
                difference = f"at {name} its {field} is {there}, here {here}"
                raise CheckpointError(f"{_WHERE} is of another adapter than {tenant.name!r}: {difference}")
    for name, here in (("rank_multiple", tenant.plan.layout.rank_multiple), ("dropout", tenant.plan.dropout)):
        if state[name] != here:
            raise CheckpointError(
                f"{_WHERE} is of another adapter than {tenant.name!r}: its {name} is {state[name]}, here {here}"
            )
    if list(own) != list(saved):
        raise CheckpointError(f"{_WHERE} is of another adapter than {tenant.name!r}: its matrices are in another order")


def _check_tensors(tenant: Tenant, tensors: Mapping[str, Tensor]) -> None:
    for name in (WEIGHTS, GRADIENT):
        tensor = tensors.get(name)
        if tensor is None and name == GRADIENT:
            continue
        if tensor is None or tensor.shape != tenant.flat.shape or tensor.dtype != tenant.flat.dtype:
            description = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(
                f"{_WHERE}: {name} is {description}; it should be {tenant.flat.dtype} {list(tenant.flat.shape)}"
            )
    if odd := [n for n in tensors if n not in (WEIGHTS, GRADIENT) and not n.startswith((OPTIMIZER, PREFIX))]:
        raise CheckpointError(f"{_WHERE} contains an unknown tensor {odd[0]!r}")


def _counters(state: Mapping[str, Any]) -> dict[str, Any]:
    counters = state["counters"]
    if not isinstance(counters, Mapping) or counters.keys() != _COUNTERS.keys():
        raise CheckpointError(f"{_WHERE}: its counters are incomplete; it is damaged")
    for name, kinds in _COUNTERS.items():
        if type(counters[name]) not in kinds:
            raise CheckpointError(f"{_WHERE}: {name} is {counters[name]!r}; it is damaged")
    return dict(counters)


def _put_optimizer(
    group: OptimizerGroup, names: Mapping[str, nn.Parameter], saved: Mapping[str, Any],
    scheduler: Mapping[str, Any] | None, tensors: Mapping[str, Tensor],
) -> None:  # fmt: skip
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(OPTIMIZER):
            continue
        name = name.removeprefix(OPTIMIZER)
        parameter = names.get(name.partition("/")[2])
        if parameter is None:
            raise CheckpointError(f"{_WHERE} holds {name!r} of an optimizer, which is for no parameter of this adapter")
        # Moments get the strides of their parameter: products of matrices with other strides round differently.
        like = parameter.shape == tensor.shape
        own[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor) if like else tensor.clone()
    unpack_optimizer(group.optimizer, {**saved, "values": decode_state(saved["values"])}, own, names)
    if scheduler is not None:
        group.lr_scheduler.load_state_dict(decode_state(scheduler["state"]))


@contextmanager
def _undone_on_error(group: OptimizerGroup) -> Iterator[None]:
    """Restore optimizer and scheduler if the block raises an error."""
    optimizer, scheduler = group.optimizer, group.lr_scheduler
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    options = [dict(options) for options in optimizer.param_groups]
    fields = {} if scheduler is None else dict(vars(scheduler))
    try:
        yield
    except Exception as error:  # a plugin's optimizer or scheduler may raise anything
        optimizer.state.clear()
        optimizer.state.update(states)
        for current, old in zip(optimizer.param_groups, options, strict=True):
            current.clear()
            current.update(old)
        if scheduler is not None:
            vars(scheduler).clear()
            vars(scheduler).update(fields)
        if isinstance(error, TwinkleError):
            raise
        raise CheckpointError(f"{_WHERE} does not fit: {type(error).__name__}: {error}") from error


TENSORS: Final = "state.safetensors"
STATE: Final = "state.json"
FORMAT: Final = 1
_OLDER: Final = frozenset({"source", "optimizer", "path"})
"""Keys that older versions wrote into specifications."""


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    """A copy of an adapter's state, in host memory.

    Attributes:
        spec: how the adapter was created.
        tensors: tensors of `LoraPool.snapshot`.
        state: state of `LoraPool.snapshot`, as JSON data.
    """

    spec: AdapterSpec
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write `state.safetensors` and `state.json` into a folder."""
        layout = _layout_of(self.state)
        named: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if _is_vector(name, tensor, layout):
                named |= {f"{name}:{part}": view.contiguous() for part, view in _matrices(layout, tensor)}
            else:
                named[name] = tensor
        save_file(named, folder / TENSORS)
        vectors = [name for name, tensor in self.tensors.items() if _is_vector(name, tensor, layout)]
        document = {
            "format": FORMAT, "create": self.spec.as_json(), "vectors": vectors, "state": dict(self.state),
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(document, indent=2, sort_keys=True), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """A snapshot as it is on disk.

    Attributes:
        spec: how the adapter was created.
        vectors: names of the tensors that were split into matrices.
        tensors: tensors in the file.
        state: see `AdapterSnapshot`.
    """

    spec: AdapterSpec
    vectors: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "WrittenSnapshot":
        """Read a folder that `AdapterSnapshot.write` filled.

        Raises:
            CheckpointError: files are missing or damaged, or were written by a newer version.
        """
        try:
            document = _read_document(folder)
            vectors, state = tuple(document["vectors"]), document["state"]
            spec = _spec_of(document["create"], folder)
            tensors = load_file(folder / TENSORS)
            if len(set(vectors)) < len(vectors):
                raise ValueError("a vector is named twice")
            if not isinstance(state, dict) or "optimizer" not in state:
                raise ValueError("the state is incomplete")
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise _damaged(folder, error) from error
        return cls(spec, vectors, tensors, state)

    def arranged_as(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a snapshot for `LoraPool.restore`, with vectors in the layout of the adapter to be replaced.

        Args:
            own: `state` of that adapter's own snapshot.

        Raises:
            CheckpointError: the snapshot is of an adapter of other layers or sizes, or tensors are missing.
        """
        try:
            layout = _layout_of(own)
            if dict(_shapes_of(self.state)) != dict(layout.shapes):
                raise CheckpointError(
                    "cannot restore the snapshot: its layers, ranks or sizes differ from those of the adapter"
                )
            parts = {
                f"{name}:{part}" for name in self.vectors for part, _ in _matrices(layout, torch.empty(layout.size))
            }
            tensors = {name: tensor for name, tensor in self.tensors.items() if name not in parts}
            tensors |= {name: self._joined(name, layout) for name in self.vectors}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"cannot restore the snapshot: its files are damaged ({error})") from error
        state = {**self.state, "layout": own["layout"], "rank_multiple": own["rank_multiple"]}
        return {"tensors": tensors, "state": state}

    def _joined(self, name: str, layout: Layout) -> Tensor:
        whole = torch.zeros(layout.size)
        for part, view in _matrices(layout, whole):
            tensor = self.tensors[f"{name}:{part}"]
            if tensor.shape != view.shape or not tensor.is_floating_point():
                raise ValueError(f"{name}:{part} is {tensor.dtype} {list(tensor.shape)}, not {list(view.shape)}")
            view.copy_(tensor)
        return whole


def read_spec(folder: Path) -> AdapterSpec | None:
    """Return the specification in a snapshot; None if the folder holds none.

    Raises:
        CheckpointError: the snapshot is damaged, or was written by a newer version.
    """
    if not (folder / STATE).is_file():
        return None
    try:
        return _spec_of(_read_document(folder)["create"], folder)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(folder, error) from error


def _read_document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    if document["format"] != FORMAT:
        raise CheckpointError(
            f"cannot read the snapshot in {folder}: its format is {document['format']!r}, this version reads {FORMAT}"
        )
    return document


def _damaged(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot read the snapshot in {folder}: its files are damaged or incomplete ({error})")


def _spec_of(values: Mapping[str, Any], folder: Path) -> AdapterSpec:
    """Read and check a specification; a corrupt rank must not lead to an allocation beyond all memory."""
    if not isinstance(values, dict):
        raise TypeError("the specification is not an object")
    spec = AdapterSpec.from_json({name: value for name, value in values.items() if name not in _OLDER})
    ranks = [spec.rank, *(rank for _, rank in spec.rank_pattern)]
    integers, switches = (*ranks, spec.seed), (spec.train_attn, spec.train_mlp, spec.train_unembed)
    numbers = (spec.alpha, spec.dropout)
    if (
        any(type(value) is not int for value in integers)
        or any(type(value) is not bool for value in switches)
        or any(type(value) not in (int, float) for value in numbers)
    ):
        raise TypeError(f"the specification has values of wrong types: {dict(values)}")
    if max(ranks) > max((math.prod(shape) for shape in shapes_in(folder / TENSORS).values()), default=0):
        raise ValueError(f"rank is {max(ranks)}, more than the number of weights")
    return spec


def _is_vector(name: str, tensor: Tensor, layout: Layout) -> bool:
    """Return whether a tensor has a number for each of the adapter's weights."""
    return tensor.shape == (layout.size,) and not name.startswith(PREFIX)


def _layout_of(state: Mapping[str, Any]) -> Layout:
    return Layout.of(_shapes_of(state), rank_multiple=state["rank_multiple"])


def _shapes_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    return ((name, Shape(*sizes)) for name, *sizes in state["layout"])


def _matrices(layout: Layout, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of A and of transposed B at each layer, without the rows that pad the rank."""
    for place, entry in layout.entries.items():
        rank = layout.shapes[place].rank
        yield f"{place}.A", entry.down_of(whole)[..., :rank, :]
        yield f"{place}.B", entry.up_of(whole)[..., :rank, :]

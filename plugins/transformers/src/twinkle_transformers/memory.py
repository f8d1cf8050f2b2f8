"""Memory: what is free, what a forward keeps, when its activations are recomputed, and large host buffers."""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle.logging import get_logger

LIMIT = "TWINKLE_MEMORY_LIMIT"
"""Environment variable that limits the host memory that this process plans its passes for."""

_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BUFFER = 1 << 20
"""Size in bytes of buffers that are returned to the system when freed; see `give_back_at_once`."""
_M_MMAP_THRESHOLD = -3
_HUGE = 4 << 20
"""Size in bytes above which numpy uses huge pages; below, torch's allocator is equally fast."""
T = TypeVar("T")
SHARE = 0.8
"""Share of the free memory that saved activations may take; heads, temporaries and fragmentation need the rest."""
_UNIT = 64
_NEAR = 0.25
"""Share of the free memory above which freed buffers of a pass on a CPU are returned to the system immediately."""
_SURELY = 0.05
"""Share of the free memory below which a rough upper bound of a pass is sufficient, without a measurement."""
_INPUTS = "\0inputs"
"""Name that replaces an adapter's where all activations of a model are measured, whatever is trained."""
_Key = tuple[str, bool, bool, bool]


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes available for tensors on `device`, including the allocator's cache; None if unknown."""
    if device.type == "cpu":
        return free_host_bytes()
    backend = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    free, _ = backend.mem_get_info(device)  # type: ignore[union-attr]
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)  # type: ignore[union-attr]
    return int(free + cached)


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory available to this process; None if unknown.

    The minimum of the kernel's `MemAvailable`, the limits of control groups of this process (for example of a
    container), and `TWINKLE_MEMORY_LIMIT` minus the process's resident memory.
    """
    limits = []
    if (available := _field(root / "proc/meminfo", "MemAvailable:")) is not None:
        limits.append(available * 1024)
    for mount, limit, used, cached in _CGROUPS:
        for folder in _groups(root, mount):
            bound, taken = _number(folder / limit), _number(folder / used)
            if bound is not None and taken is not None:
                limits.append(max(0, bound - taken + (_field(folder / "memory.stat", cached) or 0)))
    if (own := own_limit()) is not None:
        limits.append(max(0, own - (resident_bytes(root) or 0)))
    return min(limits, default=None)


def own_limit() -> int | None:
    """Return the bytes in `TWINKLE_MEMORY_LIMIT`; None if it is not set.

    Raises:
        ArgumentError: it is not a size.
    """
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text)
    if match is None or (match[3] and not match[2]):
        raise ArgumentError(f"{LIMIT} must be a size such as 4GB, 3.5GiB or 4000000000, got {text!r}")
    unit = _UNITS[match[2]] if not match[3] else 1024 ** (1 + "KMGT".index(match[2]))
    return int(float(match[1]) * unit)


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Return the resident memory of this process in bytes; None if unknown."""
    kilobytes = _field(root / "proc/self/status", "VmRSS:")
    return None if kilobytes is None else kilobytes * 1024


def give_back_host_memory() -> None:
    """Return memory that the C library (glibc) has cached to the system.

    torch's buffers on a CPU come from the C library, and its cache counts as used memory.
    """
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def give_back_at_once() -> None:
    """Make the C library (glibc) return freed buffers of 1 MiB and more to the system immediately.

    By default glibc keeps freed buffers of up to 32 MiB in a heap, whose fragmentation can make a process several times
    as large as its tensors, so that estimates of their size are useless. In return the first use of each buffer is
    slower, so this is done only when memory is short.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _BUFFER)
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
    except OSError:
        return None


def _groups(root: Path, mount: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process, from the outermost visible one."""
    base = root / mount
    yield base
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in kinds.split(",") if mount.endswith("memory") else number == "0":
            folder = base
            for name in Path(path.lstrip("/")).parts:
                folder /= name
                yield folder


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a forward saves for its backward: `fixed + per_token * tokens + per_pair * tokens * width`.

    Attributes:
        fixed: independent of the batch, such as weights in autocast's dtype.
        per_token: activations.
        per_pair: attention weights and masks; `width` is the length of the padded rows.
    """

    fixed: float
    per_token: float
    per_pair: float

    def of(self, tokens: int, width: int) -> int:
        """Return the bytes for `tokens` positions (padding included) in rows of `width`."""
        return int(self.fixed + tokens * (self.per_token + self.per_pair * width))


def measure(forward: Callable[[int], object], own: Iterable[Tensor], unit: int) -> Footprint:
    """Fit a footprint to three forwards of one row each.

    Args:
        forward: runs a row of a given number of tokens with gradients.
        own: parameters and buffers, which are not counted.
        unit: width of the first row; the others are two and three times as wide.
    """
    kept = {_plain(tensor).untyped_storage().data_ptr() for tensor in own}
    one, two, three = (saved_bytes(forward, unit * times, kept) for times in (1, 2, 3))
    per_pair = max(0.0, (three - 2 * two + one) / (2 * unit * unit))
    per_token = max(0.0, (three - one) / (2 * unit) - 4 * unit * per_pair)
    return Footprint(max(0.0, one - unit * (per_token + per_pair * unit)), per_token, per_pair)


def saved_bytes(forward: Callable[[int], object], tokens: int, kept: set[int]) -> int:
    """Return the bytes of the storages that `forward(tokens)` saves for its backward, those at `kept` excepted."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> None:
        storage = _plain(tensor).untyped_storage()
        if storage.data_ptr() not in kept:
            storages[storage.data_ptr()] = storage  # kept alive: a reused address would hide a storage

    def unpack(_: None) -> Tensor:
        raise RuntimeError("a forward that only measures has no backward")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        forward(tokens)
    return sum(storage.nbytes() for storage in storages.values())


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of this process's part of it."""
    part = _plain(tensor)
    return part.numel() * part.element_size()


def _plain(tensor: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split()) and words[0] == name), None)


def host_empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return an uninitialized dense tensor in host memory.

    torch allocates small pages, whose first use costs several times as much as copying into them.
    """
    size = prod(shape) * dtype.itemsize
    if pinned or size < _HUGE:
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=pinned)
    raw = torch.from_numpy(np.empty(size, np.uint8))
    return raw.view(dtype).as_strided(shape, stride)


def host_zeros(count: int) -> Tensor:
    """Return float32 zeros `[count]` in host memory; pages are allocated at their first use."""
    return torch.from_numpy(np.zeros(count, np.float32))


def host_copy(tensor: Tensor, *, pinned: bool = False) -> Tensor:
    """Return a copy in host memory; strides of a dense tensor are kept.

    A copy from another device to pinned memory is asynchronous: synchronize the device before reading it.
    """
    tensor = tensor.detach()
    copy = host_empty(tuple(tensor.shape), dense_stride(tensor), tensor.dtype, pinned=pinned)
    return copy.copy_(tensor, non_blocking=pinned)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps: the tensor's own if it has none."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view `[n]` of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Recompute:
    """Switches transformers' gradient checkpointing for each training pass.

    With a frozen base the backward costs one forward, so recomputation makes a step about 1.5 times as long (4/3 times
    with all weights trained). In mode "auto" the bytes that a forward keeps are measured once, on three short rows, and
    predicted for each pass from its size; the pass recomputes if they would take more than 80 % of the free memory.

    Args:
        module: the Hugging Face model, with or without adapters.
        mode: True, False or "auto".
        device: device of the model.
        context_fn: passed to `torch.utils.checkpoint`: returns the context managers of forward and recomputation.
        forward: runs `input_ids` and, for passes with padding, `attention_mask` (int64 `[1, T]`) through the body as a
            training pass would, under the same autocast; by default `module.base_model`. Of a packed pass, `input_ids`
            come with `position_ids`.
        agree: takes whether this rank must recompute, and returns whether any rank must; for ranks in lockstep, whose
            passes are not repeated after running out of memory.
        free: returns the free bytes on a device; None if unknown (then passes recompute).

    Attributes:
        on: whether passes currently recompute.

    Raises:
        ArgumentError: the mode is unknown.
        Unsupported: the mode is True, and the model cannot recompute.
    """

    def __init__(
        self,
        module: Any,
        mode: bool | Literal["auto"],
        device: torch.device | str,
        context_fn: Callable[[], tuple[Any, Any]] | None = None,
        *,
        forward: Callable[[dict[str, Tensor]], object] | None = None,
        agree: Callable[[bool], bool] | None = None,
        free: Callable[[torch.device], int | None] = free_bytes,
    ) -> None:
        if mode not in (True, False, "auto"):
            raise ArgumentError(f"gradient_checkpointing must be True, False or 'auto', got {mode!r}")
        self.mode = mode
        self.on = mode == "auto" and any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
        self._module, self._device = module, torch.device(device)
        self.forward = forward or self._body
        self._agree, self._free = agree, free
        self._options: dict[str, Any] = {"use_reentrant": False}
        if context_fn is not None:
            self._options["context_fn"] = context_fn
        self._able = bool(getattr(module, "supports_gradient_checkpointing", False))
        self._footprints: dict[_Key, Footprint | None] = {}
        self._trained: dict[str, list[Tensor]] = {}
        self._too_many: int | None = None
        self._tokens = 0
        if mode is True:
            self._switch(True)

    @property
    def possible(self) -> bool:
        """Whether a pass may recompute."""
        return self.on or (self.mode == "auto" and self._able)

    def available(self) -> int | None:
        """Return the free bytes on the device; None if unknown."""
        return self._free(self._device)

    def free_for(self, needed: int) -> int | None:
        """Return the free bytes for a pass that needs `needed` bytes; None if unknown.

        On a CPU, if that is a large part of the free memory, the C library returns freed buffers to the system from now
        on; if memory would not suffice, it first returns buffers that were freed before.
        """
        free = self.available()
        if free is None or self._device.type != "cpu" or needed <= _NEAR * free:
            return free
        give_back_at_once()
        if needed > SHARE * free:
            give_back_host_memory()
            free = self.available()
        return free

    def prepare(
        self, tokens: int, width: int | None = None, adapter: str = "", masked: bool = True, *, packed: bool = False,
        beside: int = 0, free: int | None = None,
    ) -> None:  # fmt: skip
        """Decide whether the next training pass recomputes.

        Args:
            tokens: number of positions of the batch, with padding.
            width: length of its rows (of its longest sequence, if several share a row); by default all tokens are one
                row, which overestimates terms that are quadratic in the length.
            adapter: the trained adapter; each is measured once.
            masked: whether the pass has an attention mask, which kernels may keep for each layer.
            packed: whether its sequences are in one row.
            beside: bytes that the pass needs beside activations.
            free: free bytes, if they were measured just before; by default they are measured.
        """
        if self.mode != "auto" or not self._able:
            return
        self._tokens = tokens
        needed = self.needed_bytes(tokens, tokens if width is None else width, adapter, masked, packed=packed)
        needed = needed and needed + beside
        if free is None:
            free = self.available() if needed is None else self.free_for(needed)
        wanted = self._does_not_fit(tokens, needed, free)
        self._switch(self._agree(wanted) if self._agree is not None else wanted)

    def run(self, call: Callable[[], T]) -> T:
        """Run a forward; if it runs out of memory without recomputation, repeat it with recomputation.

        Later passes of as many tokens recompute too. The repeated forward uses the random numbers of the first.
        """
        if self.mode != "auto" or self.on or not self._able or self._agree is not None:
            return call()
        state = self._random_state()
        try:
            return call()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # After the handler, nothing keeps the tensors of the failed attempt alive.
        get_logger().warning(
            "a pass of %d tokens ran out of memory; it is repeated with recomputed activations", self._tokens
        )
        self.avoid(self._tokens)
        self._set_random_state(state)
        self._switch(True)
        return call()

    def avoid(self, tokens: int) -> None:
        """Recompute passes of this many tokens from now on if the mode is "auto", because one ran out of memory."""
        self._too_many = min(tokens, self._too_many or tokens)
        if self._device.type != "cpu":
            getattr(torch, self._device.type).empty_cache()

    def needed_bytes(
        self, tokens: int, width: int, adapter: str = "", masked: bool = True, *, packed: bool = False,
        recomputed: bool = False, transient: int = 0,
    ) -> int | None:  # fmt: skip
        """Return the bytes that a pass needs for saved activations, and for gradients that do not exist yet.

        With recomputation, activations are the inputs of all layers and everything of one layer. A margin of a few
        layers is added for temporaries. None if activations could not be measured.
        """
        footprint = self._footprint(adapter, masked, packed, False)
        if footprint is None:
            return None
        kept = footprint.of(tokens, width)
        layer = kept // self._layers
        if recomputed:
            inputs = self._footprint(adapter, masked, packed, True)
            if inputs is None:
                return None
            kept = inputs.of(tokens, width) + layer
        return kept + transient * layer + sum(local_bytes(p) for p in self._trained[adapter] if p.grad is None)

    def passing_bytes(self, tokens: int, width: int, masked: bool = True, *, packed: bool = False) -> int | None:
        """Return the bytes of a pass without a backward: the activations of one layer; None if it was not measured.

        Ranks in lockstep measure only passes with a backward.
        """
        if self._agree is not None:
            return None
        footprint = self._footprint(_INPUTS, masked, packed, False)
        return None if footprint is None else footprint.of(tokens, width) // self._layers

    def surely_fits(self, tokens: int, width: int, beside: int, *, training: bool) -> bool:
        """Return whether a rough upper bound of a pass is so small that nothing must be measured.

        The bound is 64 numbers a token, layer and hidden unit, and two a head and pair of tokens: a layer with gates
        and experts keeps 15 to 30, and attention without a fused kernel keeps two.
        """
        if training and (self._agree is not None or (self.mode == "auto" and self._able)):
            return False  # ranks in lockstep measure together; recomputation needs a measurement in any case
        if (free := self.available()) is None:
            return True
        config = self._module.config.get_text_config()
        hidden, heads = (getattr(config, name, None) or 0 for name in ("hidden_size", "num_attention_heads"))
        if not hidden:
            return False
        size = max(4, int(self._module.dtype.itemsize))
        bound = size * tokens * (64 * hidden + 2 * heads * width) * (self._layers if training else 1) + beside
        if training:
            bound += sum(local_bytes(p) for p in self._module.parameters() if p.requires_grad and p.grad is None)
        return bound <= _SURELY * free

    def measure_together(self, adapter: str) -> None:
        """Make the measurement that `needed_bytes` uses, on all ranks in lockstep."""
        if self._agree is not None:
            self._footprint(adapter, True, False, False)
            if self.possible:
                self._footprint(adapter, True, False, True)

    @property
    def _layers(self) -> int:
        return getattr(self._module.config.get_text_config(), "num_hidden_layers", None) or 1

    def _footprint(self, adapter: str, masked: bool, packed: bool, recomputed: bool) -> Footprint | None:
        if self._agree is not None:
            masked, packed = True, False  # a measurement is a forward, which ranks in lockstep run together
        key = adapter, masked, packed, recomputed
        if key not in self._footprints:
            self._footprints[key] = self._measure(*key)
            self._trained[adapter] = [p for p in self._module.parameters() if p.requires_grad]
        return self._footprints[key]

    def forget(self) -> None:
        """Discard all measurements, because the model was changed."""
        self._footprints, self._trained, self._too_many = {}, {}, None

    def _does_not_fit(self, tokens: int, needed: int | None, free: int | None) -> bool:
        if needed is None or free is None or (self._too_many is not None and tokens >= self._too_many):
            return True
        if (needed > SHARE * free) is not self.on:
            get_logger().info(
                "a pass of %d tokens needs about %.2f GiB without recomputation, %.2f GiB are free: recomputation is "
                "%s", tokens, needed / 2**30, free / 2**30, "off" if self.on else "on",
            )  # fmt: skip
        return needed > SHARE * free

    def _switch(self, on: bool) -> None:
        if on == self.on:
            return
        name, old = ("enable", "disable")[not on], "gradient_checkpointing_"
        switch = getattr(self._module, f"activation_checkpointing_{name}", None)  # the name since transformers 5.20
        switch = switch or getattr(self._module, old + name, None)
        try:
            if switch is None or not self._able:
                raise ValueError("it does not support activation checkpointing")
            switch(*([self._options] if on else []))
        except ValueError as error:
            if self.mode is True:
                raise Unsupported(
                    f"gradient_checkpointing=True: {type(self._module).__name__} cannot recompute its activations "
                    f"({error}); leave it at 'auto' or False"
                ) from error
            self._able = False
            return
        self.on = on

    def _measure(self, adapter: str, masked: bool, packed: bool, recomputed: bool) -> Footprint | None:
        config = self._module.config.get_text_config()
        unit = max(_UNIT, int(getattr(config, "chunk_size", 0) or 0))
        if longest := getattr(config, "max_position_embeddings", None):
            unit = max(1, min(unit, longest // 3))
        was, training = self.on, self._module.training
        devices = [self._device] if self._device.type != "cpu" else []
        hook = self._module.get_input_embeddings().register_forward_hook(_wanting) if adapter == _INPUTS else None
        try:
            self._switch(recomputed)
            self._module.train()
            with torch.random.fork_rng(devices, device_type=self._device.type), torch.enable_grad():
                own = [*self._module.parameters(), *self._module.buffers()]
                return measure(lambda width: self._row(width, config.vocab_size, masked, packed), own, unit)
        except Exception as error:  # a model may refuse the row with any error; training itself goes on
            get_logger().warning("activations could not be measured; every pass recomputes them: %s", error)
            return None
        finally:
            if hook is not None:
                hook.remove()
            self._module.train(training)
            self._switch(was)

    def _row(self, width: int, vocabulary: int, masked: bool, packed: bool) -> object:
        ids = torch.arange(width, device=self._device)[None] % vocabulary
        if packed:
            return self.forward({"input_ids": ids, "position_ids": torch.arange(width, device=self._device)[None]})
        mask = torch.ones_like(ids)
        mask[0, -1] = 0  # a mask of only ones would be dropped
        return self.forward({"input_ids": ids} | ({"attention_mask": mask} if masked else {}))

    def _body(self, row: dict[str, Tensor]) -> object:
        return self._module.base_model(**row, use_cache=False)

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        device = getattr(torch, self._device.type) if self._device.type != "cpu" else None
        return torch.get_rng_state(), None if device is None else device.get_rng_state(self._device)

    def _set_random_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            getattr(torch, self._device.type).set_rng_state(state[1], self._device)


def _wanting(module: Any, given: Any, output: Tensor) -> Tensor:
    """Make the output of a module require a gradient, so that all later activations are kept."""
    return output if output.requires_grad else output.detach().requires_grad_()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

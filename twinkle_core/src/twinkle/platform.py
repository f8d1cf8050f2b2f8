"""The device of this process, and its rank among the other processes. Torch is imported only when it is needed."""

import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twinkle.errors import ArgumentError, MeshError, TwinkleError

if TYPE_CHECKING:
    import torch


class Platform:
    """Differences between devices, as class methods; the class is not instantiated.

    `Platform.get()` returns the subclass of the available device. A method that is called on `Platform` itself uses
    that subclass: `Platform.get_local_device()` is `Platform.get().get_local_device()`.

    Ranks come from the environment that torchrun sets (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`); a
    process without these variables is rank 0 of 1.
    """

    _prefix: str = ""
    _backend: str = ""
    _visible_env: str | None = None

    @staticmethod
    def get(device_type: str | None = None) -> "type[Platform]":
        """Return the platform `device_type` (CPU, GPU, CUDA, NPU or MPS, in any case); None selects the best available.

        Raises:
            MeshError: there is no platform of that name.
        """
        if device_type is None:
            return next(platform for platform in (GPU, NPU, MPS, CPU) if platform.is_available())
        name = device_type.strip().upper()
        if name not in _PLATFORMS:
            raise MeshError(f"device type {device_type!r} is unknown; use one of {', '.join(_PLATFORMS)} (in any case)")
        return _PLATFORMS[name]

    @staticmethod
    def get_platform(platform: str | None = None) -> "type[Platform]":
        """Return `Platform.get(platform)`, under its published name."""
        return Platform.get(platform)

    @staticmethod
    def get_rank() -> int:
        """Return the rank of this process, from 0."""
        return _number("RANK", 0)

    @staticmethod
    def get_local_rank() -> int:
        """Return the rank of this process on its machine, from 0."""
        return _number("LOCAL_RANK", 0)

    @staticmethod
    def get_world_size() -> int:
        """Return how many processes train together."""
        return _number("WORLD_SIZE", 1)

    @staticmethod
    def get_local_world_size() -> int:
        """Return how many of them run on this machine."""
        return _number("LOCAL_WORLD_SIZE", 1)

    @staticmethod
    def is_master() -> bool:
        """Return whether this is rank 0, the one that logs and writes shared files."""
        return Platform.get_rank() == 0

    @classmethod
    def is_available(cls) -> bool:
        """Return whether torch is installed and sees such a device."""
        return cls._this().is_available()

    @classmethod
    def device_prefix(cls) -> str:
        """Return torch's name of the device type: `cuda`, `npu`, `mps` or `cpu`."""
        return cls._this()._prefix

    @classmethod
    def device_backend(cls) -> str:
        """Return the backend of `torch.distributed` for the device: `nccl`, `hccl` or `gloo`."""
        return cls._this()._backend

    @classmethod
    def visible_device_env(cls) -> str | None:
        """Return the environment variable that limits the visible devices, or None if there is none."""
        return cls._this()._visible_env

    @classmethod
    def device_count(cls) -> int:
        """Return how many devices this process sees; a CPU counts as one."""
        platform = cls._this()
        if platform._visible_env is None or not platform.is_available():
            return 1 if platform.is_available() else 0
        return int(platform._module().device_count())

    @classmethod
    def get_local_device(cls, index: int | None = None) -> str:
        """Return this process's device for torch, such as `cuda:3` or `cpu`; `index` defaults to the local rank."""
        platform = cls._this()
        if platform._visible_env is None:
            return platform._prefix
        return f"{platform._prefix}:{platform.get_local_rank() if index is None else index}"

    @classmethod
    def set_local_device(cls, index: int | None = None) -> None:
        """Make `get_local_device(index)` torch's current device, if the platform has several."""
        platform = cls._this()
        if platform._visible_env is not None:
            platform._module().set_device(platform.get_local_device(index))

    @classmethod
    def synchronize(cls) -> None:
        """Wait until the device has finished all pending work."""
        platform = cls._this()
        if platform is not CPU:
            platform._module().synchronize()

    @classmethod
    def computes_bfloat16(cls) -> bool:
        """Return whether the device computes products of bfloat16 natively; otherwise they are slower than float32."""
        return cls._this().computes_bfloat16()

    @classmethod
    def get_device_rng_state(cls) -> "torch.Tensor | None":
        """Return the state of the device's random generator (uint8 `[N]`), or None on a CPU, whose is torch's own."""
        platform = cls._this()
        return None if platform is CPU else platform._module().get_rng_state()

    @classmethod
    def set_device_rng_state(cls, state: "torch.Tensor | None") -> None:
        """Restore what `get_device_rng_state` returned; None restores nothing."""
        if state is not None:
            cls._this()._module().set_rng_state(state)

    @classmethod
    def _this(cls) -> "type[Platform]":
        return Platform.get() if cls is Platform else cls

    @classmethod
    def _module(cls) -> Any:
        import torch

        return getattr(torch, cls._prefix)


class CPU(Platform):
    """Any machine."""

    _prefix = "cpu"
    _backend = "gloo"

    @classmethod
    def is_available(cls) -> bool:
        """Return True: every machine has one, with torch or without."""
        return True

    @classmethod
    def computes_bfloat16(cls) -> bool:
        """Return whether the processor has instructions for it (AVX-512 BF16 or AMX)."""
        # torch has no public name for these two questions yet.
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return _ask_torch(lambda torch: any(getattr(torch.cpu, name, bool)() for name in names))


class GPU(Platform):
    """CUDA devices, and ROCm ones, which torch calls `cuda` as well."""

    _prefix = "cuda"
    _backend = "nccl"
    _visible_env = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def is_available(cls) -> bool:
        """Return whether torch sees a CUDA or ROCm device."""
        return _ask_torch(lambda torch: torch.cuda.is_available())

    @classmethod
    def computes_bfloat16(cls) -> bool:
        """Return whether the device does not emulate it."""
        return _ask_torch(lambda torch: torch.cuda.is_bf16_supported(including_emulation=False))


class NPU(Platform):
    """Ascend devices, through the package `torch_npu`."""

    _prefix = "npu"
    _backend = "hccl"
    _visible_env = "ASCEND_RT_VISIBLE_DEVICES"

    @classmethod
    def is_available(cls) -> bool:
        """Return whether `torch_npu` is installed and sees a device."""
        from importlib.util import find_spec

        if find_spec("torch_npu") is None:
            return False
        import importlib

        importlib.import_module("torch_npu")
        return _ask_torch(lambda torch: torch.npu.is_available())

    @classmethod
    def computes_bfloat16(cls) -> bool:
        """Return whether the device does not emulate it."""
        return _ask_torch(lambda torch: torch.npu.is_bf16_supported())


class MPS(Platform):
    """Apple's Metal devices."""

    _prefix = "mps"
    _backend = "gloo"

    @classmethod
    def is_available(cls) -> bool:
        """Return whether torch sees a Metal device."""
        return _ask_torch(lambda torch: torch.backends.mps.is_available())

    @classmethod
    def computes_bfloat16(cls) -> bool:
        """Return False: some of these devices emulate it, and torch does not tell which."""
        return False


_PLATFORMS: dict[str, type[Platform]] = {"CPU": CPU, "GPU": GPU, "CUDA": GPU, "NPU": NPU, "MPS": MPS}


def find_node_ip() -> str:
    """Return the IPv4 address under which other machines reach this one; `127.0.0.1` without a network."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only selects the interface of the default route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def find_free_port(address: str = "", start_port: int | None = None, retry: int = 100) -> int:
    """Return a TCP port that is free now; bind it soon, before another process does.

    Args:
        address: the address to bind; empty means all addresses.
        start_port: the first port to try; None lets the system choose.
        retry: number of ports to try, from `start_port` on.

    Raises:
        TwinkleError: no port is free, or the address does not belong to this machine.
    """
    import socket

    ports = [0] if start_port is None else range(start_port, min(start_port + retry, 65536))
    reason: Exception | None = None
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except (OSError, OverflowError) as error:
                reason = error
                continue
            return int(probe.getsockname()[1])
    where = "chosen by the system" if start_port is None else f"among {retry} from {start_port}"
    raise TwinkleError(
        f"no free port {where} on address {address or '0.0.0.0'!r}: {reason or 'ports end at 65535'}"
    ) from reason


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise MeshError(f"environment variable {variable} is {text!r}, not a number; unset it, or start with torchrun")
    return int(text)


def _ask_torch(question: Callable[[Any], Any]) -> bool:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return False
    import torch

    return bool(question(torch))


def seed_everything(seed: int, full_determinism: bool = False) -> None:
    """Seed Python, numpy and, where it is installed, torch on all devices.

    Args:
        seed: from 0 to 2**32 - 1.
        full_determinism: also make torch use deterministic algorithms only; slower, and an operation without one
            raises.

    Raises:
        ArgumentError: the seed is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ArgumentError(f"seed is {seed!r}; give a whole number from 0 to {2**32 - 1}")
    from importlib.util import find_spec

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    if find_spec("torch") is None:
        return
    if full_determinism:
        # cuBLAS reads this when it is first used, so it must be set before any CUDA work.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.manual_seed(seed)
    if full_determinism:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False

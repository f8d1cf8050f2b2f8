"""Options of vLLM's engine, as published scripts pass them to a sampler, for `TorchSampler`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.errors import ArgumentError, Unsupported
from twinkle_registry import nearest

_RENAMED = {"max_num_seqs": "max_batch_size", "max_num_batched_tokens": "prefill_tokens", "dtype": "dtype"}
_LOADING = ("trust_remote_code", "revision")
_NUMBERS = ("gpu_memory_utilization", "max_loras", "max_lora_rank", "max_cpu_loras", "swap_space", "block_size")
_SWITCHES = (
    "enable_lora", "enable_sleep_mode", "enforce_eager", "enable_chunked_prefill", "enable_tower_connector_lora",
    "disable_log_stats",
)  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (None, 1),
    "pipeline_parallel_size": (None, 1),
    "quantization": (None,),
    "load_format": (None, "auto", "safetensors"),
    "logprobs_mode": (None,),
    "distributed_executor_backend": (None, "uni"),
}
_OWN = ("enable_return_routed_experts", "enable_prefix_caching", "max_model_len")


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """What `engine_args` mean for `TorchSampler`.

    Attributes:
        options: arguments of `TorchSampler` and of `load_model`.
        max_length: maximum number of tokens of a prompt and its sample; None is the context of the model.
        routed_experts: whether to record the experts of mixture models.
    """

    options: Mapping[str, Any]
    max_length: int | None = None
    routed_experts: bool = False

    def merged(self, given: Mapping[str, tuple[Any, Any]], others: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options: those of `engine_args`, and the arguments of the sampler.

        Args:
            given: value and default of each argument that `engine_args` may set too.
            others: further arguments.

        Raises:
            ArgumentError: an option is given in both ways, with different values.
        """
        named = {name: value for name, (value, default) in given.items() if value != default} | dict(others)
        for name, value in self.options.items():
            if name in named and named[name] != value:
                raise ArgumentError(
                    f"TorchSampler: {name} is {named[name]!r}, and engine_args says {value!r}; give one of them"
                )
        return {name: default for name, (_, default) in given.items()} | named | dict(self.options)


def read_engine_args(given: Mapping[str, Any] | None) -> EngineArgs:
    """Translate `engine_args`.

    Options that only tune vLLM's own memory, kernels and adapter slots are checked and have no effect.

    Raises:
        ArgumentError: an option is unknown (the message suggests the nearest), or its value is not allowed.
        Unsupported: an option requires what this sampler does not do, such as several devices for one model.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"TorchSampler: engine_args must be a dict, got a {type(given).__name__}")
    args = dict(given or {})
    _check_names(args)
    for name in set(args) & {*_SWITCHES, *_OWN[:2], "trust_remote_code"}:
        if not isinstance(args[name], bool):
            raise ArgumentError(f"TorchSampler: engine_args[{name!r}] must be True or False, got {args[name]!r}")
    for name in set(args) & {*_NUMBERS, "max_model_len"}:
        value = args[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ArgumentError(f"TorchSampler: engine_args[{name!r}] must be a number above 0, got {value!r}")
    for name in sorted(set(args) & set(_FIXED)):
        if args[name] not in _FIXED[name]:
            allowed = " or ".join(map(repr, _FIXED[name]))
            raise Unsupported(
                f"TorchSampler: engine_args[{name!r}]={args[name]!r}; this sampler supports {allowed} (leave it out)"
            )
    options = {_RENAMED[name]: value for name, value in args.items() if name in _RENAMED and value is not None}
    options |= {name: args[name] for name in _LOADING if args.get(name)}
    if args.get("enable_prefix_caching") is False:
        options["prefix_cache_bytes"] = 0
    return EngineArgs(options, args.get("max_model_len"), args.get("enable_return_routed_experts", False))


def _check_names(args: Mapping[str, Any]) -> None:
    known = [*_RENAMED, *_LOADING, *_NUMBERS, *_SWITCHES, *_FIXED, *_OWN]
    for name in args:
        if name not in known:
            near = nearest(str(name), known, 1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            raise ArgumentError(
                f"TorchSampler: engine_args has {name!r}, which it does not read{hint}; it reads {', '.join(known)}"
            )

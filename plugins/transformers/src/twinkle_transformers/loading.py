"""Loads a causal language model from a model id, after checking that its files are complete."""

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from twinkle.digests import FILE as DIGESTS
from twinkle.digests import check_digests
from twinkle.errors import ArgumentError, CheckpointError, ModelLoadError, RequirementMissing
from twinkle.hub import local_model
from twinkle.hub.local import alias_of, scheme_of
from twinkle.hub.quiet import quiet_transformers
from twinkle.platform import Platform
from twinkle_transformers.value_heads import settle_head

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_weights(folder: Path) -> None:
    """Check that the weights in a Hugging Face folder are complete: all shards, headers and bytes.

    Raises:
        ModelLoadError: there are none, or one is missing, truncated or corrupt; the message names the file.
    """
    if (folder / _INDEX).is_file():
        for shard in sorted(_shards(folder / _INDEX)):
            if not (folder / shard).is_file():
                raise ModelLoadError(f"{folder} lacks {shard}, which {_INDEX} lists; fetch the model again")
            read_header(folder / shard)
    elif (folder / _SINGLE).is_file():
        read_header(folder / _SINGLE)
    elif not any((folder / name).is_file() for name in _PICKLES):
        raise ModelLoadError(f"{folder} has a config.json but no weights: neither {_SINGLE} nor {_INDEX} is there")


def read_header(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the header of a safetensors file: for each tensor its `dtype`, `shape` and `data_offsets`.

    Raises:
        ModelLoadError: the file is not in safetensors format, or its length differs from its header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelLoadError(f"{path} is truncated or not a safetensors file ({size} bytes); fetch it again")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ModelLoadError(f"{path} is corrupt: its safetensors header cannot be read; fetch it again") from error
    if 8 + length + end != size:
        raise ModelLoadError(
            f"{path} is truncated or damaged: {size} bytes, its header says {8 + length + end}; fetch it again"
        )
    return dict(header)


def _shards(index: Path) -> set[str]:
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return set(weights.values())
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is corrupt: {error}; fetch it again") from error


_DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
    "float64": torch.float64, "fp64": torch.float64, "double": torch.float64,
}  # fmt: skip
_HUB_OPTIONS = ("revision", "token")
_OPTIONS = ("attn_implementation", "experts_implementation", "key_mapping", "quantization_config", "use_kernels")
_SETTLED = ("low_cpu_mem_usage", "device_map", "cache_dir", "local_files_only", "ignore_mismatched_sizes")
"""Options of `from_pretrained` that only have the values that are true here; see `_check_settled`."""
_SHOWN = 5


def load_model(
    model_id: str | Path | None,
    *,
    dtype: str | torch.dtype = "auto",
    model_cls: type | str | None = None,
    config: Any = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    skeleton: torch.dtype | None = None,
    other_arguments: Collection[str] = (),
    **from_pretrained_kwargs: Any,
) -> tuple[Any, Path | None]:
    """Load a model in evaluation mode, and return it with the local folder it came from.

    Args:
        model_id: argument of `twinkle.hub.local_model`; None makes random weights of `config`.
        dtype: dtype of the weights: a torch dtype, its name (`bfloat16`, `bf16`, `fp32`, ...), or `auto` for the saved
            one.
        model_cls: a class with `from_pretrained`, or its name in transformers; by default the causal language model
            of the configuration.
        config: a transformers configuration to use instead of the folder's.
        device: device to move the model to; None leaves it on the CPU.
        trust_remote_code: run Python code from the model's folder.
        skeleton: build the model without weights, on the meta device and in this dtype; another rank sends the weights.
        other_arguments: names of the caller's arguments, which the error about an unknown argument may suggest.
        **from_pretrained_kwargs: `attn_implementation` and the like, and fields of the configuration to change;
            `revision` and `token` go to the hub, `torch_dtype` is `dtype`, and other options of `from_pretrained` may
            have the values that are true here.

    Raises:
        ModelLoadError: the folder is missing, incomplete or corrupt; its architecture is unknown; weights that the
            model needs are absent, of another shape, or left over.
        ArgumentError: an option is unknown, or `dtype` or `model_cls` is invalid.
        RequirementMissing: an option needs a package that is not installed.
    """
    wanted = dtype_of(given_dtype(dtype, from_pretrained_kwargs) or "auto")
    _check_settled(from_pretrained_kwargs, model_id)
    if model_id is None:
        return _with_random_weights(
            model_cls, config, wanted, device, trust_remote_code, from_pretrained_kwargs, other_arguments, skeleton
        ), None
    hub = {name: from_pretrained_kwargs.pop(name) for name in _HUB_OPTIONS if name in from_pretrained_kwargs}
    folder = local_model(model_id, **{name: value for name, value in hub.items() if value is not None})
    check_weights(folder)
    _check_files(folder)
    with quiet_transformers():
        config = _config(folder, config, trust_remote_code)
        config, options = _with_fields(config, from_pretrained_kwargs, other_arguments)
        cls = _model_class(model_cls, config, trust_remote_code)
        if "classifier_dropout" in from_pretrained_kwargs and "Classification" not in cls.__name__:
            raise ArgumentError(
                f"classifier_dropout is for classification and value heads, and {cls.__name__} has none"
            )
        if skeleton is not None:
            return _without_weights(cls, config, skeleton, options), folder
        options |= {"config": config, "dtype": wanted}
        model = _load(cls, folder, options, trust_remote_code)
        if device is not None:
            model = model.to(device)
    return model, folder


def _with_random_weights(
    model_cls: type | str | None, config: Any, dtype: Any, device: Any, trust_remote_code: bool,
    given: Mapping[str, Any], others: Collection[str], skeleton: torch.dtype | None,
) -> Any:  # fmt: skip
    """Return a model of a configuration, with weights from torch's random generator."""
    if config is None:
        raise ArgumentError("a model needs model_id= (a folder or a reference), or config= to make random weights")
    with quiet_transformers():
        config, options = _with_fields(_checked_config(config), given, others)
        cls = _model_class(model_cls, config, trust_remote_code)
        if skeleton is not None:
            return _without_weights(cls, config, skeleton, options)
        wanted = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
        model = _from_config(cls, config, dtype_of(wanted), options)
    return model if device is None else model.to(device)


def _check_files(folder: Path) -> None:
    """Refuse a model that Twinkle saved and whose files were changed afterwards."""
    if not (folder / DIGESTS).is_file():
        return
    try:
        check_digests(folder, [path.name for path in folder.iterdir()])  # removed files are not checked
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error


def given_dtype(dtype: Any, kwargs: dict[str, Any]) -> Any:
    """Return `dtype`, or `torch_dtype` of the keywords, which is removed: transformers has both names.

    Raises:
        ArgumentError: they are two different types.
    """
    other = kwargs.pop("torch_dtype", None)
    if other is None:
        return dtype
    if dtype not in (None, "auto") and dtype_of(dtype) != dtype_of(other):
        raise ArgumentError(f"dtype={dtype!r} and torch_dtype={other!r} are two names of one argument; give one")
    return other


def _check_settled(given: dict[str, Any], model_id: str | Path | None) -> None:
    """Remove options of `from_pretrained` that have no other values here; None and False are no requests.

    Raises:
        ArgumentError: one has a value that cannot be met; the error has the remedy.
    """
    asked = {name: given.pop(name) for name in _SETTLED if name in given}
    asked = {name: value for name, value in asked.items() if value not in (None, False)}
    asked.pop("low_cpu_mem_usage", None)  # weights are always read one by one
    remedies = {
        "device_map": "the model is on this process's device, and a device_mesh distributes it; leave it out",
        "cache_dir": "models are in the cache of their hub; set HF_HOME or MODELSCOPE_CACHE to move it",
        "local_files_only": f"{str(model_id)!r} is at a hub; set HF_HUB_OFFLINE=1 to use only what was downloaded",
        "ignore_mismatched_sizes": "weights of another shape would be replaced by random ones. A head of another size "
        "is accepted without it (num_labels=)",
    }
    if _is_local(model_id):
        asked.pop("local_files_only", None)
    device = Platform.get_local_device()
    if str(asked.get("device_map")) in (device, device.partition(":")[0]):
        asked.pop("device_map")
    for name, value in asked.items():
        raise ArgumentError(f"{name}={value!r}: {remedies[name]}")


def _is_local(model_id: str | Path | None) -> bool:
    if model_id is None:
        return True
    place = alias_of(str(model_id))
    return scheme_of(place) is None and Path(place).expanduser().exists()


def dtype_of(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the torch dtype of a name; `auto` stays as it is.

    Raises:
        ArgumentError: it is not the name of a floating-point type.
    """
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise ArgumentError(f"dtype must be a floating-point type such as torch.bfloat16, got {dtype}")
        return dtype
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name == "auto":
        return name
    if name not in _DTYPES:
        from twinkle_registry import nearest

        near = nearest(name, _DTYPES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"dtype must be 'auto', a torch dtype or one of {', '.join(_DTYPES)}, got {dtype!r}{hint}")
    return _DTYPES[name]


def _config(folder: Path, config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if config is not None:
        return _checked_config(config)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelLoadError(_config_problem(folder, error)) from error


def _checked_config(config: Any) -> Any:
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise ArgumentError(f"config must be a transformers configuration, got a {type(config).__name__}")
    return config


def _config_problem(folder: Path, error: Exception) -> str:
    import json

    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from twinkle_registry import nearest

    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as broken:
        return f"{folder / 'config.json'} cannot be read: {broken}; fetch the model again"
    if not isinstance(fields, dict):
        return f"{folder / 'config.json'} is not a JSON object; fetch the model again"
    if "auto_map" in fields:
        return f"{folder} contains Python code; read it, then pass trust_remote_code=True to run it"
    asked = fields.get("model_type")
    if asked is None:
        return f"{folder / 'config.json'} has no model_type, so its architecture is unknown"
    known = list(CONFIG_MAPPING.keys())
    if asked in known:
        return f"{folder / 'config.json'} is not a valid {asked} configuration: {error}"
    near = nearest(str(asked), known)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return (
        f"{folder}: transformers {transformers.__version__} does not support the architecture {asked!r}{hint}; a newer "
        "version may: pip install -U transformers"
    )


def _with_fields(config: Any, given: Mapping[str, Any], others: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return a configuration with changed fields from `given`, and the options of `from_pretrained` in it."""
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    fields = [name for name in config.to_dict() if not name.startswith("_")]
    fields += ["num_labels", "classifier_dropout"]  # valid, though not stored under these names
    changed = copy.deepcopy(config)
    for name in given.keys() - options.keys():
        if name not in fields:
            from twinkle_registry import nearest

            near = nearest(name, [*others, *_OPTIONS, *fields])
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ArgumentError(
                f"there is no argument {name!r} of the model, no such option of its loading ({', '.join(_OPTIONS)}), "
                f"and no such field of {type(config).__name__}{hint}"
            )
        setattr(changed, name, given[name])
    return changed, options


def _model_class(model_cls: Any, config: Any, trust_remote_code: bool) -> Any:
    import transformers

    if model_cls is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        if not remote and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            listed = getattr(config, "architectures", None) or ["of another task"]
            raise ModelLoadError(
                f"{type(config).__name__} ({', '.join(listed)}) is not a causal language model in transformers; give "
                "model_cls=, a class or its name in transformers"
            )
        return transformers.AutoModelForCausalLM
    if isinstance(model_cls, str):
        resolved = getattr(transformers, model_cls, None)
        if resolved is None:
            from twinkle_registry import nearest

            near = nearest(model_cls, [name for name in dir(transformers) if "For" in name or name.endswith("Model")])
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ArgumentError(f"model_cls: transformers {transformers.__version__} has no {model_cls!r}{hint}")
        model_cls = resolved
    if not hasattr(model_cls, "from_pretrained"):
        raise ArgumentError(f"model_cls must be a transformers model class with from_pretrained, got {model_cls!r}")
    return model_cls


def _load(cls: Any, folder: Path, options: dict[str, Any], trust_remote_code: bool) -> nn.Module:
    if cls.__name__.startswith("Auto"):
        options["trust_remote_code"] = trust_remote_code
    try:
        loaded: tuple[nn.Module, dict[str, Any]] = cls.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except ImportError as error:
        raise RequirementMissing(f"loading {folder} needs a package that is not installed: {error}") from error
    except (ValueError, OSError, RuntimeError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load {folder}: {type(error).__name__}: {error}") from error
    model, report = loaded
    report = settle_head(model, report, folder)
    _check_report(report, folder, type(model).__name__)
    return model


def _without_weights(cls: Any, config: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        return _from_config(cls, config, dtype, options)


def _from_config(cls: Any, config: Any, dtype: Any, options: Mapping[str, Any]) -> Any:
    attention = {k: v for k, v in options.items() if k == "attn_implementation"}
    make = cls.from_config if cls.__name__.startswith("Auto") else cls._from_config
    return make(config, dtype=dtype, **attention).eval()


def _check_report(report: Mapping[str, Any], folder: Path, name: str) -> None:
    """Refuse a model with missing weights, which transformers initializes randomly, or with unused ones."""
    problems = []
    if missing := sorted(report["missing_keys"]):
        problems.append(f"{len(missing)} weights of {name} are missing: {_some(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [f"{key} is {list(saved)}, {name} has {list(own)}" for key, saved, own in mismatched]
        problems.append(f"{len(mismatched)} weights have another shape: {_some(shapes)}")
    if unexpected := sorted(report["unexpected_keys"]):
        problems.append(f"{len(unexpected)} weights have no place in {name}: {_some(unexpected)}")
    if errors := report.get("error_msgs"):
        problems.append(str(errors))
    if problems:
        raise ModelLoadError(
            f"{folder} does not fit {name}: {'; '.join(problems)}; the files are incomplete or of another architecture "
            "(model_cls= chooses one)"
        )


def _some(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")

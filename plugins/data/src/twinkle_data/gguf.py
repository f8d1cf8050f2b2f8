"""GGUF files as Hugging Face folders: converted once, and cached by the digest of their bytes."""

import contextlib
import hashlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from twinkle.errors import ModelLoadError, RequirementMissing
from twinkle.paths import cache_dir, new_directory, write_text

_NEEDS = ("torch", "transformers", "accelerate", "safetensors", "gguf", "sentencepiece")
_RECIPE = "1"  # incremented when the conversion changes, so that cached results are converted again


def converted(path: Path) -> Path:
    """Return a Hugging Face folder with the model of a GGUF file: bfloat16 safetensors, tokenizer, chat template.

    The first call takes seconds to minutes and says so; later calls find the result in the cache by the file's
    SHA-256, which is itself remembered by path, size and time of change. Processes that ask at once convert once.

    Raises:
        ModelLoadError: the file is not GGUF, is one part of several, or holds an unknown architecture.
        RequirementMissing: a package that the conversion needs is not installed.
    """
    _check_file(path)
    name = f"{path.stem}-{digest(path)[:16]}-bf16-{_RECIPE}"
    target = cache_dir("models", "gguf") / name
    if target.is_dir():
        return target
    _check_packages(path)
    from filelock import FileLock

    with FileLock(target.with_name(f".{name}.lock")):
        if not target.is_dir():
            _say(path, target)
            with new_directory(target) as folder:
                _convert(path, folder)
    return target


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, from the cache if path, size and mtime are unchanged."""
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    note = cache_dir("models", "digests") / f"{key}.txt"
    if note.is_file():
        return note.read_text(encoding="ascii")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    write_text(note, sha256)
    return sha256


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ModelLoadError(f"there is no GGUF file {path}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {magic!r}; download it again")
    if "-of-0" in path.stem:
        raise ModelLoadError(
            f"{path.name} is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)"
        )


def _check_packages(path: Path) -> None:
    if missing := [name for name in _NEEDS if importlib.util.find_spec(name) is None]:
        raise RequirementMissing(
            f"reading {path.name} needs {', '.join(missing)}; run: pip install 'twinkle-data[gguf]'"
        )


def _say(path: Path, target: Path) -> None:
    from twinkle.logging import get_logger

    size = path.stat().st_size / 2**20
    get_logger().info(
        "converting %s (%.0f MiB) to safetensors, once; this takes about a minute: %s", path.name, size, target
    )


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from twinkle.hub.quiet import quiet_transformers

    try:
        # The progress bar of the conversion ignores transformers' own switch, so its output stream is replaced.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            _forget_quantization(model)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # damaged bytes can raise any error in the parser, such as struct.error
        raise ModelLoadError(
            f"cannot read {path}: {type(error).__name__}: {error}; the file is damaged, or transformers does not know "
            "its architecture as GGUF: use the model's safetensors folder instead"
        ) from error


def _forget_quantization(model: Any) -> None:
    """Make a dequantized model savable: transformers refuses to save models marked as GGUF."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    model.config.architectures = [type(model).__name__]

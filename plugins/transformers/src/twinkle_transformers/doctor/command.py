"""The command `twinkle doctor [MODEL]`: facts of the machine, and the evidence for each fast path of a model."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("model", required=False)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    help="Try the model in this dtype; may be given twice. Both by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def main(model: str | None, dtypes: tuple[str, ...], as_json: bool) -> None:
    """Check which fast paths are exact on this machine, and report why others are not.

    The fast paths are measured on MODEL, a folder or the id of a model at a hub; by default on a tiny random Llama,
    which is created for this purpose. Plugins and their problems: `twinkle plugins doctor`.
    """
    with _errors_alone():
        report = examine(model, dtypes or ("float32", "bfloat16"))
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for line in lines_of(report):
        click.echo(line)


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Log only errors inside, unless a level was set: the report contains the warnings of models."""
    from twinkle.logging import LEVEL_VARIABLE, get_logger

    logger = get_logger()
    before = logger.level
    if LEVEL_VARIABLE not in os.environ:
        logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)


def examine(model: str | None, dtypes: Sequence[str]) -> dict[str, Any]:
    """Return the facts of the machine, and the evidence of each dtype, as plain data.

    Args:
        model: a folder or id; None makes a tiny random model.
        dtypes: "float32", "bfloat16".
    """
    import torch

    from twinkle.platform import Platform
    from twinkle_transformers.doctor.machine import machine_facts

    device = torch.device(Platform.get_local_device())
    with tempfile.TemporaryDirectory() as folder:
        place = model if model is not None else _tiny_llama(Path(folder, "tiny"))
        paths = {name: [evidence.as_dict() for evidence in evidence_of(place, name)] for name in dtypes}
    return {
        "machine": machine_facts(device),
        "model": model or "a tiny random Llama",
        "prefix_attention": prefix_attention(device),
        "paths": paths,
    }


def _tiny_llama(folder: Path) -> str:
    """Write a random Llama of two layers and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=264, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def evidence_of(model: str, dtype: str) -> Iterator[Any]:
    """Yield the evidence for each fast path of a model in a dtype, measured on this machine.

    Args:
        model: a folder or id.
        dtype: name of a torch dtype.
    """
    from twinkle.errors import Unsupported
    from twinkle_torch.numerics import Evidence
    from twinkle_transformers.model import TransformersModel
    from twinkle_transformers.pool.multi import MultiLoraTransformersModel
    from twinkle_transformers.sampler import TorchSampler

    built: Any
    try:
        built = MultiLoraTransformersModel(model_id=model, mixed_precision="no", dtype=dtype)
    except Unsupported as error:
        built = TransformersModel(model_id=model, mixed_precision="no", dtype=dtype)
        yield Evidence("fused", False, "structure", str(error), dtype=dtype)
    yield from built.evidence()
    yield from TorchSampler(model=built).evidence()


def prefix_attention(device: Any) -> str:
    """Return how plain attention to a prefix that several sequences share is computed on a device."""
    from twinkle_torch.prefix_attention import has_kernel

    if device.type != "cpu":
        return f"reads copies of its keys: the kernel that needs none is for the CPU, this is {device.type}"
    if not has_kernel():
        return "reads copies of its keys: this torch lacks the flash kernel that needs none"
    return "reads its keys where they are, by torch's flash kernel"


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as text, about ten lines."""
    machine = report["machine"]
    sets = ", ".join(machine["instruction_sets"]) or "none of those that matter"
    yield f"processor   {machine['processor']}, {machine['cores']} cores, {sets}"
    switches = "".join(f", {name}={value}" for name, value in machine["switches"].items())
    place = f"{machine['device']}, {machine['capability']}, {machine['threads']} threads"
    yield f"torch       {machine['torch']} on {place}{switches}"
    yield f"memory      {_gigabytes(machine['free_bytes'])} free of {_gigabytes(machine['total_bytes'])}"
    wide, half = machine["products"]["float32"], machine["products"]["bfloat16"]
    yield f"float32     {wide['gflops']:g} GFLOP/s now, less beside other work; {_row_bits(wide['other_bits'])}"
    ratio = half["gflops"] / wide["gflops"]
    pace = "faster" if ratio >= 1 else "slower"
    yield (
        f"bfloat16    {half['gflops']:g} GFLOP/s now, {max(ratio, 1 / ratio):.1f} x {pace} than float32; "
        f"{_row_bits(half['other_bits'])}"
    )
    if any(path["path"] == "prefixes" and path["exact"] for paths in report["paths"].values() for path in paths):
        yield f"prefixes    attention to a shared prefix {report['prefix_attention']}"
    yield f"fast paths of {report['model']}:"
    for dtype, paths in report["paths"].items():
        on = [path for path in paths if path["exact"]]
        yield f"  {dtype:<9} on: {', '.join(map(_grounds, on)) or 'none'}"
        for path in paths:
            if not path["exact"]:
                named = path["reason"].startswith(f"{path['path']} ")
                yield f"  {dtype:<9} off: {path['reason'] if named else path['path'] + ': ' + path['reason']}"


def _grounds(path: Mapping[str, Any]) -> str:
    if path["method"] == "equal bits":
        return f"{path['path']} (equal bits)"
    return f"{path['path']} (off by {max(path['difference'], path['moved']):.0e}, rounding {path['rounding']:.0e})"


def _row_bits(other: Sequence[int]) -> str:
    from twinkle_transformers.doctor.machine import ROW_COUNTS

    if not other:
        return f"a row has the same bits in a product of 64 rows and of {len(ROW_COUNTS)} other sizes"
    return f"a row has other bits in a product of {', '.join(map(str, other))} rows than in one of 64"


def _gigabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e9:.1f} GB"

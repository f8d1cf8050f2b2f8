"""Checkpoints that somebody made up: files, states, configurations and folders that no service writes."""

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from twinkle_server.engine.files import MANIFEST
from twinkle_transformers.adapters import CONFIG
from twinkle_transformers.pool.snapshots import STATE

Damage = Callable[[Path, str], object]
"""Changes a folder, of whose files one is named."""
Prepare = Callable[[Path], object]
"""Changes a sound folder, manifest included."""


class Bait:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.mark, "ran"))


def tensors(header: Any, data: bytes = b"", size: int | None = None) -> Damage:
    """Put a safetensors file of that header in place of the named one; `size` is what it says of the header's."""

    def damage(folder: Path, name: str) -> None:
        head = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(head) if size is None else size) + head + data)

    return damage


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def renamed(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the header of the named file, whose data stays."""

    def damage(folder: Path, name: str) -> None:
        data = (folder / name).read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        tensors(change(header), data[8 + size :])(folder, name)

    return damage


def first(**values: Any) -> Callable[[dict[str, Any]], Any]:
    """Change the first tensor of a header."""
    return lambda header: {name: value | values if not at else value for at, (name, value) in enumerate(header.items())}


def unpickled(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(Bait(folder.parent / "mark")))


def zipped(folder: Path, name: str) -> None:
    torch.save({"x": Bait(folder.parent / "mark")}, folder / name)


def beside(folder: Path, name: str) -> None:
    """Leave older formats, which are pickles, in place of the named file."""
    (folder / name).unlink()
    for other in ("adapter_model.bin", "state.pt", "pytorch_model.bin"):
        zipped(folder, other)


TENSOR_FILES: dict[str, Damage] = {
    "empty": lambda folder, name: (folder / name).write_bytes(b""),
    "a pickle": unpickled,
    "a pickle in a zip": zipped,
    "pickles in its place": beside,
    "header longer than the file": tensors(b"{}", size=2**20),
    "header longer than memory": tensors(b"{}", size=2**63 - 1),
    "header of no size": tensors(b"", size=0),
    "header that is no JSON": tensors(b"\xff" * 64),
    "header that is a list": tensors([]),
    "header of many brackets": tensors(b'{"a":' + b"[" * 100_000),
    "header of spaces alone": tensors(b" " * 30_000_000),
    "no tensors": tensors({}),
    "many tensors of nothing": tensors({f"t{i}": entry([0], 0, 0) for i in range(5_000)}),
    "shape beyond all numbers": tensors({"a": entry([2**40, 2**40], 0, 4)}, b"1234"),
    "shape beyond the data": renamed(first(shape=[2**30])),
    "shape of huge and nothing": renamed(first(shape=[2**62, 0], data_offsets=[0, 0])),
    "negative shape": renamed(first(shape=[-1])),
    "shape of other numbers": renamed(first(shape=[1.5, None])),
    "offsets beyond the end": renamed(first(data_offsets=[0, 2**50])),
    "offsets turned round": renamed(first(data_offsets=[64, 0])),
    "offsets that overlap": renamed(lambda header: dict.fromkeys(header, entry([2], 0, 8))),
    "offsets with a hole": renamed(lambda header: dict(list(header.items())[1:])),
    "a type of nobody": renamed(first(dtype="Object")),
    "another type": renamed(first(dtype="I32")),
    "metadata that is no text": renamed(lambda header: {**header, "__metadata__": {"format": {"a": [1]}}}),
}  # fmt: skip


def said(**changes: Any) -> Damage:
    """Change the JSON file."""

    def damage(folder: Path, name: str) -> None:
        path = folder / (STATE if (folder / STATE).exists() else CONFIG)
        found = json.loads(path.read_bytes())
        for key, value in changes.items():
            *above, last = key.split("__")
            inner = found
            for part in above:
                inner = inner[part]
            inner[last] = value
        path.write_text(json.dumps(found))

    return damage


STATES: dict[str, Damage] = {
    "rank beyond memory": said(create__rank=2**30),
    "rank of text": said(create__rank="4"),
    "no rank": said(create__rank=None),
    "seed of text": said(create__seed="1"),
    "switches of text": said(create__train_attn="x", create__train_mlp=[], create__train_unembed={}),
    "unknown field": said(create__code="import os"),
    "create is a list": said(create=[]),
    "layout beyond memory": said(state__layout=[["model.layers.0.self_attn.q_proj", 2**40, 2**40, 2**20]]),
    "layout of text": said(state__layout="model"),
    "layout without end": said(state__layout=[["a", 1, 1, 1]] * 10_000),
    "vectors that are not there": said(vectors=["weights"] * 2),
    "vectors of numbers": said(vectors=[1, None]),
    "state is a list": said(state=[]),
    "another format": said(format=2),
    "JSON of many brackets": lambda folder, name: (folder / STATE).write_bytes(b"[" * 200_000),
    "JSON that is none": lambda folder, name: (folder / STATE).write_bytes(b"\xff\xfe"),
}
CONFIGS: dict[str, Damage] = {
    "rank beyond memory": said(r=2**30),
    "rank of text": said(r="4"),
    "scale that is no number": said(lora_alpha="x"),
    "another kind": said(peft_type="PROMPT_TUNING"),
    "no kind": said(peft_type="x"),
    "JSON of many brackets": lambda folder, name: (folder / CONFIG).write_bytes(b"[" * 200_000),
    "JSON that is none": lambda folder, name: (folder / CONFIG).write_bytes(b"\xff\xfe"),
    "JSON that is a list": lambda folder, name: (folder / CONFIG).write_bytes(b"[]"),
}
"""For every use of the weights; what follows says which layers they are for, which a sampler reads alone."""
CONFIGS_OF_SAMPLERS: dict[str, Damage] = {
    "a module to import": said(megatron_config={"a": 1}, megatron_core="antigravity"),
    "no layers": said(target_modules=[]),
    "layers of numbers": said(target_modules=[1, None]),
    "weights from elsewhere": said(init_lora_weights="pissa"),
}


def sealed(damage: Damage, name: str) -> Prepare:
    """Damage a file, and write a manifest that fits."""
    return lambda folder: (damage(folder, name), seal(folder))


def seal(folder: Path) -> None:
    """Write a manifest that fits."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != MANIFEST:
            data = path.read_bytes()
            files[path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": files, "facts": {}}))


def outside(folder: Path) -> Path:
    """Return a file that is no part of the checkpoint, with the bytes of one that was."""
    place = folder.parent / f"{folder.name}-outside"
    place.write_bytes((folder / CONFIG).read_bytes())
    return place


def linked(folder: Path) -> None:
    """Have a link where a file was; it is listed, with the right digest."""
    place = outside(folder)
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(place)
    seal(folder)


def linked_unlisted(folder: Path) -> None:
    place = outside(folder)
    (folder / CONFIG).unlink()
    seal(folder)
    (folder / CONFIG).symlink_to(place)


def is_a_link(folder: Path) -> None:
    seal(folder)
    folder.rename(folder.with_name(f"{folder.name}-real"))
    folder.symlink_to(f"{folder.name}-real")


def replaced(make: Callable[[Path], object]) -> Prepare:
    """Put something else where a listed file was."""

    def prepare(folder: Path) -> None:
        seal(folder)
        (folder / CONFIG).unlink()
        make(folder / CONFIG)

    return prepare


def listed(*names: str) -> Prepare:
    """List further names, which lead elsewhere."""

    def prepare(folder: Path) -> None:
        digest = {"sha256": hashlib.sha256(outside(folder).read_bytes()).hexdigest(), "size": 1}
        seal(folder)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        manifest["files"] |= {name.format(folder=folder): digest for name in names}
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return prepare


def manifest(data: bytes) -> Prepare:
    return lambda folder: (folder / MANIFEST).write_bytes(data)


FOLDERS: dict[str, Prepare] = {
    "a link in place of a file": linked,
    "a link beside the files": linked_unlisted,
    "a link in place of the folder": is_a_link,
    "a pipe": replaced(os.mkfifo),
    "a folder": replaced(Path.mkdir),
    "a device": replaced(lambda place: place.symlink_to("/dev/zero")),
    "a pickle beside the files": lambda folder: (seal(folder), zipped(folder, "adapter_model.bin")),
    "a name above": listed("../{folder.name}-outside"),
    "an absolute name": listed("{folder}-outside"),
    "a name with an end": listed("adapter_config.json\0.txt"),
    "no name": listed(""),
    "a dot": listed("."),
    "a long name": listed("x" * 5000),
    "no manifest": lambda folder: None,
    "a manifest of brackets": manifest(b"[" * 200_000),
    "a manifest of spaces": manifest(b" " * 20_000_000),
    "a manifest of many files": listed(*(f"f{number}" for number in range(20_000))),
    "a manifest without files": manifest(b'{"format": 1, "files": {}, "facts": {}}'),
    "a manifest of other things": manifest(b'{"format": 1, "files": {"a": {"sha256": [], "size": "x"}}, "facts": {}}'),
}

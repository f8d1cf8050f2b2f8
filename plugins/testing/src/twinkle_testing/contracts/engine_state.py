"""Contract checks of engines, state: snapshots, exports, paging, and damaged files."""

import json
from typing import TYPE_CHECKING

from twinkle.engine import (
    AdapterRef,
    Step,
)
from twinkle.errors import CheckpointError, Unsupported
from twinkle_testing.contracts.case import NotApplicable, require
from twinkle_testing.contracts.engine_case import (
    MANIFEST,
    EngineCase,
    apart,
    raises,
    same_bits,
)
from twinkle_testing.contracts.values import shown

if TYPE_CHECKING:
    from torch import Tensor


def snapshots(case: EngineCase) -> None:
    """A restored snapshot continues bit for bit, with pending gradients; later training does not change the copy."""
    ref = case.trained()
    case.backward(ref, case.rows(0, 1))
    copied, bare = case.engine.snapshot(ref), case.engine.snapshot(ref, gradient=False)
    norms = []

    def go_on(adapter: AdapterRef) -> dict[str, "Tensor"]:
        case.backward(adapter, case.rows(2))
        norms.append(case.step(adapter).grad_norm)
        case.backward(adapter, case.rows(3))
        case.step(adapter)
        return case.weights(adapter)

    after = go_on(ref)
    folder, empty = case.written(copied), case.written(bare)
    require(case.engine.read_spec(folder) == case.spec(), f"read_spec() gave {shown(case.engine.read_spec(folder))}")
    again = case.restored(folder)
    require(same_bits(go_on(again), after), "training continues differently from a restored snapshot")
    require(norms[0] == norms[1], f"the first step has the norm {norms[0]}, and {norms[1]} from the snapshot")
    case.refused_step(Step(case.restored(empty)), "a step from a snapshot with gradient=False")


def folders(case: EngineCase) -> None:
    """`read_spec` returns None for an empty folder and for an export."""
    for what, folder in (("an empty folder", case.new_folder()), ("an export", case.exported(case.adapter()))):
        found = case.engine.read_spec(folder)
        require(found is None, f"read_spec() of {what} gave {shown(found)}; it must be None")


def exports(case: EngineCase) -> None:
    """An export is in PEFT's format, and `load` of it gives the same log-probabilities."""
    ref, other = case.trained(), case.adapter(9)
    folder = case.exported(ref)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        require((folder / name).is_file(), f"an export has no {name}")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    base = config.get("base_model_name_or_path")
    require(base == "base-model", f"base_model_name_or_path is {base!r}; export() was called with 'base-model'")
    require(config.get("r") == case.spec().rank, f"r is {config.get('r')!r}; the rank is {case.spec().rank}")
    case.engine.load(other, folder)
    require(
        apart(case.logps(other), case.logps(ref)) <= case.precision, "a loaded export gives other log-probabilities"
    )
    case.backward(other, case.rows())
    case.step(other)


def damaged_files(case: EngineCase) -> None:
    """A file that is missing, truncated or of another rank is a `CheckpointError`; the adapter stays unchanged."""
    ref, engine = case.trained(), case.engine
    case.backward(ref, case.rows(0))
    before = case.weights(ref)
    wide = case.trained(rank=6)
    for what, write, read in (
        ("restore", case.saved, engine.restore),
        ("load", case.exported, engine.load),
        ("read_version", case.exported, lambda _, folder: engine.read_version(folder)),
    ):
        for name in sorted(path.name for path in write(ref).iterdir() if not _is_optional(path.name)):
            for damage in ("cut", "missing"):
                folder = write(ref)
                content = (folder / name).read_bytes()
                (folder / name).unlink()
                if damage == "cut":
                    (folder / name).write_bytes(content[: len(content) // 2])
                with raises(f"{what}() where {name} is {damage}", CheckpointError):
                    read(ref, folder)
        if what != "read_version":
            with raises(f"{what}() of an adapter of another rank", CheckpointError):
                read(ref, write(wide))
    require(same_bits(before, case.weights(ref)), "a checkpoint that was refused changed the weights")
    case.step(ref)


def paging(case: EngineCase) -> None:
    """An adapter that was moved to host memory or disk continues unchanged; otherwise `page` is `Unsupported`."""
    moved_, stayed = case.trained(), case.trained()
    if not case.has("page"):
        with raises("page() of an engine without the feature", Unsupported):
            case.engine.page(moved_, "host")
        raise NotApplicable("its features do not include 'page'")
    for to in ("host", "disk", "device"):
        for ref in (moved_, stayed):
            case.backward(ref, case.rows(0))
        case.engine.page(moved_, to, case.new_folder() if to == "disk" else None)
        held = case.engine.bytes_of(moved_)
        require(getattr(held, to) > 0, f"after page(..., {to!r}) bytes_of() is {held}")
        for ref in (moved_, stayed):
            case.backward(ref, case.rows(1))
            case.step(ref)
    require(same_bits(case.weights(moved_), case.weights(stayed)), "an adapter that was moved trains otherwise")


def _is_optional(name: str) -> bool:
    """Return whether the engine need not read a file: that of the caller, or one for people."""
    return name == MANIFEST or name.lower().startswith("readme")

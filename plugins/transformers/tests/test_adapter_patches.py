"""Patches of one adapter of a pool: its own training rows change, and nothing else."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle.patch import Patch
from twinkle.testing import tiny_model
from twinkle_transformers.noise import token_keys, uniforms_from
from twinkle_transformers.pool.multi import MultiLoraTransformersModel

CONFIG = {"r": 2, "target_modules": "all-linear"}


class Shift(Patch):
    """Adds a constant, and remembers what it was given."""

    per_adapter: ClassVar[bool] = True
    seen: ClassVar[list[tuple[tuple[int, ...], Tensor]]] = []

    def __init__(self, by: float = 0.5) -> None:
        self.by = by

    def __call__(self, module: Any) -> Any:
        return module

    def change_embeddings(self, embeddings: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
        self.seen.append((tuple(embeddings.shape), draw(3)))
        return embeddings + self.by


class Wrong(Shift):
    """Returns another shape."""

    def change_embeddings(self, embeddings: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
        return embeddings[:1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("patched") / "model")


@pytest.fixture
def model(base: Path) -> MultiLoraTransformersModel:
    made = MultiLoraTransformersModel(model_id=str(base), mixed_precision="no")
    for name in ("a", "b"):
        made.add_adapter_to_model(name, CONFIG, seed=1)
    return made


def row(*tokens: int) -> dict[str, Any]:
    return {"input_ids": list(tokens), "labels": [*tokens[1:], -100]}


ROWS = [row(5, 6, 7, 8, 9), row(5, 6, 7, 20), row(30, 31, 32)]


def logps(model: Any, *names: str) -> list[Tensor]:
    outputs = model.forward_backward(
        inputs=[entry for _ in names for entry in ROWS], adapter_name=[name for name in names for _ in ROWS]
    )
    return [torch.as_tensor(output["logps"]) for output in outputs]


def test_noise_has_the_size_of_the_paper_and_depends_on_nothing_but_the_row() -> None:
    keys = token_keys(3, 7, torch.zeros(400, dtype=torch.int64), torch.arange(400))
    numbers = uniforms_from(keys, 9, 64)
    assert 0 <= float(numbers.min()) < 1e-3 < 0.999 < float(numbers.max()) < 1
    assert float(numbers.double().mean()) == pytest.approx(0.5, abs=5e-3)
    assert float(numbers.double().var()) == pytest.approx(1 / 12, rel=0.02)
    assert torch.equal(uniforms_from(keys[5:9], 9, 64), numbers[5:9])
    assert not torch.equal(uniforms_from(keys, 10, 64), numbers)


def test_only_the_training_rows_of_the_adapter_change(model: MultiLoraTransformersModel) -> None:
    before = logps(model, "a", "b")
    model.zero_grad(adapter_name="a", flush=True)
    model.zero_grad(adapter_name="b", flush=True)
    evaluated = torch.as_tensor(model.forward_only(inputs=ROWS, adapter_name="a")["logps"])
    Shift.seen.clear()
    model.apply_patch(Shift, by=0.5, adapter_name="a")
    after = logps(model, "a", "b")
    width = model.model.get_input_embeddings().weight.shape[1]
    assert [shape for shape, _ in Shift.seen] == [(len(r["input_ids"]), width) for r in ROWS]
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = float((old - new).abs().max())
        assert changed > 1e-4 if index < len(ROWS) else changed < 1e-5
    again = torch.as_tensor(model.forward_only(inputs=ROWS, adapter_name="a")["logps"])
    torch.testing.assert_close(again, evaluated, rtol=0, atol=1e-6)
    assert len(Shift.seen) == len(ROWS)
    model.undo_patch(Shift, adapter_name="a")
    model.zero_grad(adapter_name="a", flush=True)
    model.zero_grad(adapter_name="b", flush=True)
    for old, new in zip(before, logps(model, "a", "b"), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-6)


def test_the_numbers_of_a_row_do_not_depend_on_the_pass(model: MultiLoraTransformersModel) -> None:
    def draws(size: int | None, neighbours: tuple[str, ...] = ()) -> list[Tensor]:
        Shift.seen.clear()
        if neighbours:
            logps(model, *neighbours, "a")
        else:
            model.forward_backward(inputs=ROWS, adapter_name="a", micro_batch_size=size)
        for name in (*neighbours, "a"):
            model.zero_grad(adapter_name=name, flush=True)
        model.optimizer_group["a"].cur_step = 0
        return [draw for _, draw in sorted(Shift.seen, key=lambda seen: seen[0])]  # rows have different lengths

    model.apply_patch(Shift, adapter_name="a")
    together = draws(None)
    for other in (draws(1), draws(None, ("b",))):
        assert all(torch.equal(one, two) for one, two in zip(together, other, strict=True))
    assert len({tuple(draw.flatten().tolist()) for draw in together}) == len(ROWS)


def test_neftune_changes_embeddings_by_at_most_its_size(model: MultiLoraTransformersModel) -> None:
    patch = pytest.importorskip("twinkle_patches.neftune").NEFTunePatch(noise_alpha=5.0)
    embeddings = torch.zeros(20, 64)
    noise = patch.change_embeddings(embeddings, lambda features: torch.rand(20, features))
    bound = 5.0 / math.sqrt(20 * 64)
    assert 0.9 * bound < float(noise.abs().max()) <= bound
    quiet = logps(model, "a")
    model.zero_grad(adapter_name="a", flush=True)
    model.apply_patch("NEFTunePatch", noise_alpha=0.0, adapter_name="a")
    model.optimizer_group["a"].cur_step = 0
    for one, other in zip(quiet, logps(model, "a"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_patches_of_the_base_and_of_adapters_are_told_apart(model: MultiLoraTransformersModel) -> None:
    with pytest.raises(ArgumentError, match="a patch of one adapter; give adapter_name="):
        model.apply_patch("NEFTunePatch")
    with pytest.raises(ArgumentError, match="changes the base model, which all adapters share"):
        model.apply_patch("NoSplitModulesPatch", module_names=["LlamaMLP"], adapter_name="a")
    model.apply_patch(Wrong, adapter_name="a")
    with pytest.raises(Exception, match="must return"):
        model.forward_backward(inputs=ROWS, adapter_name="a")

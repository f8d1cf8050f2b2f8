"""A kernel stands in for the grouped products of adapters that share a pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle.kernel import kernelize, unkernelize
from twinkle.model import MultiLoraTransformersModel
from twinkle.testing import tiny_model

PLACE = "twinkle_transformers.lowrank.grouped.grouped_product"


class OneByOne:
    """A grouped product, group by group."""

    calls = 0

    def __call__(self, groups: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return each group's rows times its matrix."""
        type(self).calls += 1
        pieces = torch.split_with_sizes(rows, groups.lengths)
        return torch.cat([piece @ matrix for piece, matrix in zip(pieces, matrices, strict=True)])


def test_a_kernel_computes_the_low_rank_terms_of_every_layer(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    model = MultiLoraTransformersModel(model_id=str(tmp_path / "model"), mixed_precision="no")
    for name, rank in (("a", 4), ("b", 2)):
        config = {"r": rank, "target_modules": "all-linear", "init_lora_weights": False}
        model.add_adapter_to_model(name, config, seed=1)
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 4, 3], "labels": [4, 3, -100]}]
    owners = ["a", "b"]
    plain = [row["logps"] for row in model.forward_only(inputs=rows, adapter_name=owners)]
    kernelize(model, {PLACE: OneByOne})
    model.forward_only(inputs=rows, adapter_name=owners)  # the first call also measures what a pass takes
    OneByOne.calls = 0
    with_kernel = [row["logps"] for row in model.forward_only(inputs=rows, adapter_name=owners)]
    used = OneByOne.calls
    unkernelize(model)
    again = [row["logps"] for row in model.forward_only(inputs=rows, adapter_name=owners)]
    layers = len([name for name in model.pool.sites if "lm_head" not in name])
    assert used == 2 * layers
    assert OneByOne.calls == used
    for one, two, three in zip(plain, with_kernel, again, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        assert torch.equal(one, three)


def test_the_place_has_to_be_there(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    model = MultiLoraTransformersModel(model_id=str(tmp_path / "model"), mixed_precision="no")
    with pytest.raises(ArgumentError, match="grouped_products"):
        kernelize(model, {PLACE + "s": OneByOne})

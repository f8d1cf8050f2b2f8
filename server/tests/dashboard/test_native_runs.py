"""Curves of runs that the Twinkle client trains: with fused steps, and with the single calls of a local script."""

from collections.abc import Iterator
from typing import Any

import pytest
from native_rows import CONFIG, rows

from twinkle_client import MultiLoraTransformersModel, TwinkleClient

from .conftest import Site


@pytest.fixture
def model(site: Site) -> Iterator[MultiLoraTransformersModel]:
    with TwinkleClient(site.served.url, site.keys["ana"]) as client:
        made = MultiLoraTransformersModel("ledger/model", client=client)
        made.add_adapter_to_model("a", CONFIG)
        made.set_optimizer("AdamW", lr=0.5)
        yield made


def points(site: Site, model: MultiLoraTransformersModel) -> list[dict[str, Any]]:
    client = site.client(site.keys["ana"])
    run = model.training_run_id()
    found: list[dict[str, Any]] = client.get(f"/ui/runs/{run}/steps.json").json()["points"]
    shown = '<td colspan="9" class="none">no optimizer steps yet' not in client.get(f"/ui/runs/{run}").text
    assert shown == bool(found)
    return found


def test_a_run_of_the_client_has_a_point_for_each_optimizer_step(site: Site, model: MultiLoraTransformersModel) -> None:
    for _ in range(3):
        model.forward_backward(rows(1, 6, 9))
        model.clip_grad_and_step()
    found = points(site, model)
    assert [point["step"] for point in found] == [1, 2, 3]
    for point in found:
        assert (point["lr"], point["grad_norm"], point["tokens"]) == (0.5, 2.0, 9), "rows of 6 and 9, without 3 labels"
        assert point["loss"] > 0


def test_passes_of_an_accumulation_are_one_step(site: Site, model: MultiLoraTransformersModel) -> None:
    model.add_adapter_to_model("b", CONFIG, gradient_accumulation_steps=2)
    model.set_optimizer("AdamW", lr=0.5)
    for _ in range(4):
        model.forward_backward(rows(1, 6))
        model.clip_grad_and_step()
    assert [(point["step"], point["tokens"], point["grad_norm"]) for point in points(site, model)] == [
        (1, 6, 2.0), (2, 6, 2.0),
    ]  # fmt: skip


def test_single_calls_of_a_step_have_the_same_figures(site: Site, model: MultiLoraTransformersModel) -> None:
    for _ in range(2):
        model.forward(rows(1, 6))
        loss = model.calculate_loss()
        model.backward()
        model.clip_grad_norm()
        model.step()
        model.zero_grad()
        model.lr_step()
    found = points(site, model)
    assert [point["step"] for point in found] == [1, 2]
    for point in found:
        assert (point["lr"], point["grad_norm"], point["tokens"]) == (0.5, 1.0, 3)
        assert point["loss"] == pytest.approx(float(loss.result))


def test_a_step_without_clipping_has_a_learning_rate_only(site: Site, model: MultiLoraTransformersModel) -> None:
    model.forward_backward(rows(1, 6))
    assert points(site, model) == []
    model.step()
    [point] = points(site, model)
    assert (point["lr"], "grad_norm" in point) == (0.5, False)

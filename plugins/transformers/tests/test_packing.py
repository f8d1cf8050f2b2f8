"""A batch trains the same whether its rows are padded, lie one after the other, or come packed."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture
from torch import Tensor
from transformers import AutoModelForCausalLM
from uneven import uneven_rows

from twinkle.data_format import LossOutput
from twinkle.dataloader import DataLoader
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.loss import Loss
from twinkle.processor import InputProcessor
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

LENGTHS = (5, 19, 12, 7, 12, 3)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ALONE = ((0,), (1,), (2,), (3,), (4,), (5,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.2)


def rows() -> list[dict[str, Any]]:
    made = uneven_rows(LENGTHS)
    return [{**row, "loss_scale": [0.5 + i % 3 for i in range(len(row["labels"]))]} for row in made]


def packed(groups: Any) -> list[dict[str, Any]]:
    """Rows as a packing data set makes them: features one after the other, positions from 0 for each."""
    made = []
    for group in groups:
        members = [rows()[index] for index in group]
        row = {key: [x for member in members for x in member[key]] for key in members[0]}
        made.append(row | {"position_ids": [i for member in members for i in range(len(member["input_ids"]))]})
    return made


def build(folder: Path, lora: bool = True, processor: dict[str, Any] | None = None, **options: Any) -> Any:
    model: Any = TransformersModel(
        model_id=str(folder), mixed_precision=options.pop("mixed_precision", "no"), **options
    )
    if lora:
        torch.manual_seed(7)
        model.add_adapter_to_model("default", LORA)
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.05
    model.set_processor("InputProcessor", **(processor or {}))
    model.set_loss(WeighedRows())
    model.set_optimizer("SGD", lr=1.0)
    return model


class WeighedRows(Loss):
    """Uses everything of a batch: labels, weights of tokens, an argument a row and one a token."""

    row_inputs = ("shift",)

    def __call__(self, inputs: Any, outputs: Any, *, advantages: Any = None, shift: Any = None) -> LossOutput:
        mask = (inputs["labels"] != -100).to(outputs["logps"].dtype) * inputs["loss_scale"]
        if shift is not None:
            padded = torch.zeros_like(mask)
            for row, values in enumerate(shift):
                real = inputs["attention_mask"][row].nonzero().squeeze(-1)
                padded[row, real] = torch.as_tensor(values, dtype=mask.dtype)
            mask = mask * padded
        if advantages is not None:
            mask = mask * torch.as_tensor(advantages, dtype=mask.dtype)[:, None]
        return LossOutput(-(outputs["logps"] * mask).sum(), int((inputs["labels"] != -100).sum()))


def trained(model: Any, inputs: Any, **arguments: Any) -> tuple[float, float, dict[str, Tensor]]:
    """Loss sum, denominator and undivided gradients of one batch."""
    output = model.forward_backward(inputs=inputs, **arguments)
    gradients = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
    model.zero_grad(flush=True)
    return output["loss"] * output["num_tokens"], output["num_tokens"], gradients


def reference(model: Any, advantages: Any = None, shift: Any = None) -> tuple[float, float, dict[str, Tensor]]:
    """The same in float64, one row at a time, in plain torch."""
    wide = copy.deepcopy(model.model).double()
    wide.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index, row in enumerate(rows()):
        labels = torch.tensor(row["labels"])
        logps = wide(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        weights = torch.tensor(row["loss_scale"]) * (1.0 if advantages is None else advantages[index])
        weights = weights * (1.0 if shift is None else torch.tensor(shift[index]))
        kept = labels != -100
        total = total - (logps[kept].gather(-1, labels[kept, None]).squeeze(-1) * weights[kept]).sum()
        count += int(kept.sum())
    total.backward()
    return float(total.detach()), count, {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}


def same(found: tuple[float, float, dict[str, Tensor]], wanted: tuple[float, float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1] == wanted[1]
    assert found[2].keys() == wanted[2].keys()
    difference = sum(float((found[2][n].double() - x.double()).square().sum()) for n, x in wanted[2].items())
    assert (difference / sum(float(x.double().square().sum()) for x in wanted[2].values())) ** 0.5 <= 1e-5


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "padded": ({}, ALONE),
    "padded left": ({"padding_side": "left"}, ALONE),
    "padding free": ({"padding_free": True}, ALONE),
    "padding free left": ({"padding_free": True, "padding_side": "left"}, ALONE),
    "packed": ({}, ((0, 1), (2, 3, 4), (5,))),
    "packed left": ({"padding_side": "left"}, ((0, 1, 2, 3), (4, 5))),
    "packed, padding free": ({"padding_free": True}, ((0,), (1, 2), (3, 4, 5))),
    "all in one": ({}, ((0, 1, 2, 3, 4, 5),)),
}


@pytest.mark.full
@pytest.mark.parametrize("lora", [True, False])
def test_every_form_of_a_batch_gives_the_same_loss_and_gradients(folder: Path, lora: bool) -> None:
    model: Any = build(folder, lora)
    advantages = [1.0, -0.5, 2.0, 0.25, 1.5, -1.0]
    shift = [[1.0 + 0.1 * place for place in range(length)] for length in LENGTHS]
    plain, weighed = reference(model), reference(model, advantages, shift)
    for options, groups in FORMS.values():
        model.set_processor("InputProcessor", **options)
        for size in (None, 2):
            same(trained(model, packed(groups), micro_batch_size=size), plain)
            given = {"advantages": advantages, "shift": shift, "micro_batch_size": size}
            same(trained(model, packed(groups), **given), weighed)


def test_outputs_and_metrics_have_a_padded_row_for_each_sequence(folder: Path) -> None:
    model = build(folder, processor={"padding_side": "left"})
    model.set_loss("CrossEntropyLoss")
    wanted = model.forward_only(inputs=rows(), return_logits=True)
    model.calculate_loss()
    numbers = measured(model)
    real = torch.tensor([[i >= max(LENGTHS) - n for i in range(max(LENGTHS))] for n in LENGTHS])
    for inputs, options in ((rows(), {"padding_free": True}), (packed(((0, 1), (2, 3, 4, 5))), {})):
        model.set_processor("InputProcessor", padding_side="left", **options)
        for size in (None, 1):
            found = model.forward_only(inputs=inputs, return_logits=True, micro_batch_size=size)
            assert found["logps"].shape == (len(LENGTHS), max(LENGTHS))
            torch.testing.assert_close(found["logps"], wanted["logps"], rtol=1e-4, atol=1e-4)
            assert torch.equal(found["predictions"], wanted["predictions"])
            torch.testing.assert_close(found["logits"][real], wanted["logits"][real], rtol=1e-4, atol=1e-4)
            model.calculate_loss()
            assert measured(model) == pytest.approx(numbers, rel=1e-5)


def measured(model: Any) -> dict[str, float]:
    values: dict[str, float] = model.calculate_metric(is_training=False)
    return {name: value for name, value in values.items() if "time" not in name and "speed" not in name}


@pytest.mark.full
def test_log_probabilities_of_a_padded_batch_go_back_into_a_packed_one(folder: Path) -> None:
    model = build(folder)
    model.set_loss(Ratio())
    old = model.forward_only(inputs=rows())["logps"]
    for inputs, options in ((rows(), {"padding_free": True}), (packed(((0, 1), (2, 3, 4, 5))), {})):
        model.set_processor("InputProcessor", **options)
        for size in (None, 1, 2):
            output = model.forward_backward(inputs=inputs, micro_batch_size=size, old_logps=old)
            assert output["loss"] == pytest.approx(1.0, rel=1e-4)
            model.zero_grad(flush=True)


class Ratio(Loss):
    """Mean of exp(logps - old_logps) over trained tokens."""

    def __call__(self, inputs: Any, outputs: Any, *, old_logps: Tensor) -> LossOutput:
        mask = inputs["labels"] != -100
        return LossOutput((outputs["logps"] - old_logps).exp()[mask].sum(), int(mask.sum()))


def test_per_row_arguments_have_one_entry_a_sequence(folder: Path) -> None:
    model = build(folder)
    with pytest.raises(ArgumentError, match="advantages has 3 entries, the batch has 6 rows"):
        model.forward_backward(inputs=packed(((0, 1), (2, 3, 4), (5,))), advantages=[1.0, 2.0, 3.0])


def test_batches_collated_before_go_the_same_way(folder: Path) -> None:
    model = build(folder)
    wanted = trained(model, rows())
    collated = InputProcessor(padding_free=True)([row | {"length": len(row["input_ids"])} for row in rows()])
    same(trained(model, collated), wanted)
    loader = DataLoader(rows(), batch_size=6, num_workers=0)
    loader.set_processor("InputProcessor", padding_free=True)
    (batch,) = list(loader)
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    same(trained(model, batch), wanted)
    # A padded batch is cut into rows again, whose padding a processor without padding leaves out.
    padded = InputProcessor(padding_side="left")(rows())
    model.set_processor("InputProcessor", padding_free=True)
    same(trained(model, padded), wanted)


def test_any_callable_may_return_rows_that_hold_several_sequences(folder: Path) -> None:
    model = build(folder)
    wanted = trained(model, rows())

    def two_rows(given: Any) -> Any:
        first, second = packed(((0, 1, 2), (3, 4, 5)))
        width = len(first["input_ids"])
        batch = {}
        for key, fill in (("input_ids", 0), ("labels", -100), ("loss_scale", 0.0), ("position_ids", 0)):
            batch[key] = torch.tensor([first[key], second[key] + [fill] * (width - len(second[key]))])
        batch["attention_mask"] = torch.tensor([[1] * width, [1] * 22 + [0] * (width - 22)])
        return batch

    model.set_processor(two_rows)
    same(trained(model, rows()), wanted)


def test_positions_that_go_back_to_something_else_are_refused(folder: Path) -> None:
    model = build(folder)
    row = {**rows()[1], "position_ids": [*range(10), *range(3, 12)]}
    with pytest.raises(DataError, match="row 0 of the batch: position_ids go from 9 to 3 at 10"):
        model.forward_only(inputs=[row])


@pytest.mark.parametrize("threaded", [False, True])
def test_recomputed_activations_see_the_sequences(folder: Path, threaded: bool) -> None:
    wanted = trained(build(folder), rows())
    model = build(folder, processor={"padding_free": True}, gradient_checkpointing=True)
    if not threaded:
        same(trained(model, rows()), wanted)
        return
    # The backward in another thread, as autograd does it on a GPU: no context variable of ours is set there.
    model.forward(inputs=rows())
    loss = model.calculate_loss()
    worker = threading.Thread(target=model.backward)
    worker.start()
    worker.join()
    gradients = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
    same((loss * wanted[1], wanted[1], gradients), wanted)


def test_a_padded_batch_keeps_every_bit_after_a_packed_one(folder: Path) -> None:
    fresh, used = build(folder), build(folder)
    trained(used, packed(((0, 1, 2), (3, 4, 5))))
    first, second = trained(fresh, rows()), trained(used, rows())
    assert first[:2] == second[:2]
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.full
def test_bfloat16_stays_as_near_as_padding_does(folder: Path) -> None:
    model = build(folder, mixed_precision="bf16")
    wanted = reference(model)[2]
    errors = []
    for options in ({}, {"padding_free": True}):
        model.set_processor("InputProcessor", **options)
        found = trained(model, rows())[2]
        errors.append(sum(float((found[n] - wanted[n]).square().sum()) for n in wanted))
    assert errors[1] <= 1.5 * errors[0]


def test_a_model_that_mixes_sequences_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import FalconConfig

    from twinkle.testing import tiny_tokenizer

    config = FalconConfig(vocab_size=264, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model: Any = TransformersModel(model_id=str(tmp_path), mixed_precision="no")
    model.set_processor("InputProcessor", padding_free=True)
    with pytest.raises(Unsupported, match=r"FalconForCausalLM does not take several sequences.*pad instead: leave"):
        model.forward_only(inputs=rows())
    assert model.forward_only(inputs=rows()[:1])["logps"].shape == (1, LENGTHS[0])

"""DPO and GRPO through the model: one update however the rows are cut, against float64 torch; pairs are never cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture
from transformers import AutoModelForCausalLM
from uneven import uneven_rows

from twinkle.errors import ArgumentError
from twinkle.loss import DPOLoss
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.batches import row_inputs, share_arguments, split_rows
from twinkle_transformers.model import TransformersModel

LENGTHS = (5, 9, 12, 7, 16, 3)
LR = 16.0  # large enough that rounding of the parameters does not hide the update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return uneven_rows(LENGTHS)


def places(row: dict[str, Any]) -> list[int]:
    return [place for place, label in enumerate(row["labels"]) if label != -100]


class Reference:
    """The same step in plain torch, float64, one row at a time."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model, self.logps, self.entropies = model.double(), [], []
        for row in rows:
            every = self.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)[places(row)]
            targets = torch.tensor(row["labels"])[places(row)]
            self.logps.append(every.gather(-1, targets[:, None])[:, 0])
            self.entropies.append(-(every.exp() * every).sum(-1))

    def update(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()))
        return {name: -LR * grad for name, grad in zip(named, grads, strict=True)}


def trained(folder: Path, loss: Any, processor: dict[str, Any] | None = None, **options: Any) -> TransformersModel:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.set_processor("InputProcessor", **(processor or {}))
    model.set_loss(loss, **options)
    model.set_optimizer("SGD", lr=LR, weight_decay=0.0)
    return model


def update(model: TransformersModel, rows: list[Any], micro: int | None, **arguments: Any) -> dict[str, torch.Tensor]:
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    model.forward_backward(inputs=rows, micro_batch_size=micro, **arguments)
    model.clip_grad_and_step(max_grad_norm=0)
    return {name: p.detach() - before[name] for name, p in model.model.named_parameters()}


def error(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    difference = sum(float((ours[n].double() - wanted[n]).square().sum()) for n in wanted)
    return (difference / sum(float(wanted[n].square().sum()) for n in wanted)) ** 0.5


def shifts(rows: list[dict[str, Any]], scale: float, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(len(places(row)), generator=draw, dtype=torch.float64) * scale for row in rows]


def spread(rows: list[dict[str, Any]], values: list[torch.Tensor], left: bool = False) -> torch.Tensor:
    """One padded row of numbers a row; what is not trained is -200, as reference models on several ranks pad it."""
    whole = torch.full((len(rows), max(LENGTHS)), -200.0)
    for number, (row, value) in enumerate(zip(rows, values, strict=True)):
        first = max(LENGTHS) - len(row["input_ids"]) if left else 0
        whole[number, [first + place for place in places(row)]] = value.float()
    return whole


@pytest.mark.full
def test_grpo_updates_alike_however_the_rows_are_cut(folder: Path, rows: list[dict[str, Any]]) -> None:
    reference = Reference(folder, rows)
    old = [logps.detach() + shift for logps, shift in zip(reference.logps, shifts(rows, 0.3, 2), strict=True)]
    ref = [logps.detach() + shift for logps, shift in zip(reference.logps, shifts(rows, 0.3, 3), strict=True)]
    advantages = [1.0, -0.5, 0.3, -2.0, 0.8, 1.5]
    terms = []
    for logps, entropies, o, r, a in zip(reference.logps, reference.entropies, old, ref, advantages, strict=True):
        ratio = (logps - o).exp()
        policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        terms.append((policy + 0.1 * ((r - logps).exp() - (r - logps) - 1) - 0.05 * entropies).mean())
    wanted = reference.update(torch.stack(terms).mean())
    errors = {}
    for micro in (None, 1, 2, 3, 4):
        for left in (False, True):
            model = trained(folder, "GRPOLoss", {"padding_side": "left"} if left else None, beta=0.1, entropy_coef=0.05)
            whole = spread(rows, ref, left)
            forms = {"old_logps": [o.tolist() for o in old], "ref_logps": whole if micro != 3 else whole.tolist()}
            errors[micro, left] = error(update(model, rows, micro, advantages=advantages, **forms), wanted)
    assert {how: found for how, found in errors.items() if not found < 1e-6} == {}


def dpo_update(reference: Reference, ref: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ratios = [(logps - r).sum() for logps, r in zip(reference.logps, ref, strict=True)]
    margins = torch.stack([c - r for c, r in zip(ratios[::2], ratios[1::2], strict=True)])
    return reference.update(-torch.nn.functional.logsigmoid(0.5 * margins).mean())


@pytest.mark.full
def test_dpo_updates_alike_however_the_pairs_are_cut(folder: Path, rows: list[dict[str, Any]]) -> None:
    reference = Reference(folder, rows)
    ref = [logps.detach() + shift for logps, shift in zip(reference.logps, shifts(rows, 0.3, 2), strict=True)]
    sums = [float(r.sum()) for r in ref]
    forms: list[dict[str, Any]] = [
        {"ref_logps": [r.tolist() for r in ref]},
        {"ref_outputs": {"logps": spread(rows, ref), "loss": torch.tensor(0.0)}},
        {"ref_chosen_logps": sums[::2], "ref_rejected_logps": torch.tensor(sums[1::2])},
    ]
    wanted = dpo_update(reference, ref)
    errors = {}
    for micro in (None, 2, 3, 4, 6):
        for number, form in enumerate(forms):
            errors[micro, number] = error(update(trained(folder, "DPOLoss", beta=0.5), rows, micro, **form), wanted)
    packed = [
        {key: a[key] + b[key] for key in a} | {"position_ids": [*range(len(a["labels"])), *range(len(b["labels"]))]}
        for a, b in zip(rows[::2], rows[1::2], strict=True)
    ]
    errors["packed", 1] = error(update(trained(folder, "DPOLoss", beta=0.5), packed, 1, **forms[0]), wanted)
    assert {how: found for how, found in errors.items() if not found < 1e-6} == {}


def test_a_reference_is_what_forward_only_returned_and_numbers_do_not_depend_on_the_cut(
    folder: Path, rows: list[dict[str, Any]]
) -> None:
    seen = []
    for micro in (None, 1, 2, 3):
        model = trained(folder, "DPOLoss")
        reference = model.forward_only(inputs=rows, micro_batch_size=micro)
        if micro != 1:
            assert model.calculate_loss(ref_outputs=reference) == pytest.approx(0.693147, abs=1e-5)
        model.forward_backward(inputs=rows, ref_outputs=reference, micro_batch_size=micro if micro != 1 else 2)
        model.clip_grad_and_step()
        model.forward_backward(inputs=rows, ref_outputs=reference)
        seen.append(model.calculate_metric(is_training=True))
        assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"} <= seen[-1].keys()
        assert seen[-1]["rewards/accuracies"] > 0
    for numbers in seen[1:]:
        for name in ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen"):
            assert numbers[name] == pytest.approx(seen[0][name], rel=1e-4, abs=1e-6)


def test_ratios_of_what_the_same_model_sampled_are_one(folder: Path) -> None:
    prompts = [{"input_ids": [5, 6, 7]}, {"input_ids": [9, 8, 7, 6, 5]}, {"input_ids": [3]}]
    responses = TorchSampler(folder).sample(
        prompts, {"temperature": 1.0, "max_tokens": 6, "logprobs": 1, "num_samples": 2, "seed": 1}
    )
    drawn = [sequence for response in responses for sequence in response.sequences]
    inputs = [
        {"input_ids": ids, "labels": [-100] * (len(row["input_ids"]) - 1) + sequence.tokens + [-100]}
        for row, response in zip(prompts, responses, strict=True)
        for sequence in response.sequences
        for ids in [row["input_ids"] + sequence.tokens]
    ]
    old = [[entry[0][1] for entry in sequence.logprobs or []] for sequence in drawn]
    model = trained(folder, "GRPOLoss")
    advantages = torch.tensor([1.0, -1.0] * 3)
    found = model.forward_backward(inputs=inputs, old_logps=old, advantages=advantages, micro_batch_size=4)
    assert found["num_tokens"] == 6
    assert found["loss"] == pytest.approx(0.0, abs=1e-4)
    model.clip_grad_and_step()
    numbers = model.calculate_metric(is_training=True)
    assert numbers["clip_ratio"] == 0.0
    assert 0 <= numbers["approx_kl"] < 1e-7


def test_micro_batches_that_would_cut_a_pair_are_refused_before_anything_is_computed(
    folder: Path, rows: list[dict[str, Any]]
) -> None:
    model = trained(folder, "DPOLoss", reference_free=True)
    with pytest.raises(ArgumentError, match="DPOLoss needs 2 consecutive rows together, but a micro-batch has 1"):
        model.forward_backward(inputs=rows, micro_batch_size=1)
    for micro in (None, 2):
        with pytest.raises(ArgumentError, match=r"DPOLoss needs 2 consecutive rows together, but .*has (5|1); give"):
            model.forward_backward(inputs=rows[:5], micro_batch_size=micro)
    model.forward(inputs=rows[:3])
    with pytest.raises(ArgumentError, match="the batch has 3 rows, which are not pairs"):
        model.calculate_loss()
    assert all(parameter.grad is None for parameter in model.model.parameters())
    with pytest.raises(ArgumentError, match=r"ref_logps is 'base'; give one entry a row .*disable_lora=True"):
        trained(folder, "DPOLoss").forward_backward(inputs=rows, ref_logps="base")
    with pytest.raises(ArgumentError, match=r"ref_chosen_logps has 6 entries, the batch has 6 rows; .*for each 2 rows"):
        trained(folder, "DPOLoss").forward_backward(
            inputs=rows, ref_chosen_logps=[0.0] * 6, ref_rejected_logps=[0.0] * 3
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_reference_may_be_part_of_that_of_more_and_longer_rows(
    folder: Path, rows: list[dict[str, Any]], side: str
) -> None:
    model = trained(folder, "GRPOLoss", {"padding_side": side})
    reference = model.forward_only(inputs=rows)["logps"][:4]
    for micro in (None, 1, 3):
        for given in (reference, reference.tolist()):
            model.forward_backward(inputs=rows[:4], advantages=[0.0] * 4, ref_logps=given, micro_batch_size=micro)
            model.clip_grad_and_step()
            assert model.calculate_metric(is_training=True)["kl"] < 1e-9, micro


@pytest.mark.sample(2)
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_numbers_of_completions_padded_to_the_longest_are_refused_however_the_rows_are_cut(
    folder: Path, rows: list[dict[str, Any]], micro: int | None
) -> None:
    """A short row has fewer tokens than the longest completion: alone, its numbers look like those of its positions."""
    padded = torch.zeros(len(rows), max(len(places(row)) for row in rows))
    for given in (padded, padded.tolist()):
        model = trained(folder, "GRPOLoss")
        with pytest.raises(ArgumentError, match=r"old_logps of row \d has 10 numbers"):
            model.forward_backward(inputs=rows, advantages=[1.0] * len(rows), old_logps=given, micro_batch_size=micro)
        assert all(parameter.grad is None for parameter in model.model.parameters())


@pytest.mark.parametrize(
    ("rows", "size", "together", "sizes"),
    [(8, 3, 2, [2, 2, 2, 2]), (8, 5, 2, [4, 4]), (7, 4, 3, [3, 3, 1]), (5, 1, 2, [1] * 5), (5, None, 2, [5])],
)  # fmt: skip
def test_sizes_are_rounded_down_to_whole_groups(rows: int, size: int | None, together: int, sizes: list[int]) -> None:
    assert [len(part) for part in split_rows(range(rows), size, together)] == sizes


def test_arguments_are_cut_with_their_rows_and_groups() -> None:
    cut = row_inputs(DPOLoss())
    given = {
        "ref_chosen_logps": [1, 2, 3],
        "ref_logps": [[0, 1, 2]] * 4 + [[5, 6, 7]] * 2,
        "old_logps": [[1], [2, 2], [3, 3, 3], [4], [5], [6]],
        "beta": [1, 2],
        "advantages": None,
    }
    right = share_arguments(given, cut, [(4, 3), (2, 2)], left=False)
    assert right[1] == {
        "ref_chosen_logps": [3], "ref_logps": [[5, 6]] * 2, "old_logps": [[5], [6]], "beta": [1, 2], "advantages": None,
    }  # fmt: skip
    assert right[0]["ref_logps"] == [[0, 1, 2]] * 4
    assert share_arguments(given, cut, [(4, 3), (2, 2)], left=True)[1]["ref_logps"] == [[6, 7]] * 2
    table: dict[str, Any] = {"ref_logps": torch.arange(12).reshape(2, 6), "mine": torch.arange(12).reshape(2, 6)}
    [share] = share_arguments(table, cut | {"mine": 1}, [(2, 3)], left=True)
    assert share["ref_logps"].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert share["mine"].shape == (2, 6)  # nobody said that it has a number for each token

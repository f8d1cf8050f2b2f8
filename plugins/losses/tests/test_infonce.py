"""InfoNCE against a scalar loop over its formula, in float64; groups, hard negatives and what is refused."""

import itertools
import math
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle_losses.infonce import InfonceLoss

LABELS = [1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0]  # groups with 2, 0, 1 and 0 negatives
FULL = [1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]


def vectors(rows: int, size: int = 4) -> torch.Tensor:
    torch.manual_seed(0)
    raw = torch.randn(rows, size, dtype=torch.float64)
    raw[6] = raw[1] + 0.01  # near the first positive: a negative that nobody marked
    return torch.nn.functional.normalize(raw, dim=-1).requires_grad_()


def loss(labels: list[int], embeddings: Any, **options: Any) -> Any:
    return InfonceLoss(**options)({"labels": torch.tensor(labels)}, {"embeddings": embeddings})


def by_hand(
    labels: list[int], e: torch.Tensor, temperature: float, use_batch: bool, hard: int | None, mask: bool,
    margin: float, qq: bool, dd: bool,
) -> torch.Tensor:  # fmt: skip
    starts = [row for row, label in enumerate(labels) if label == 1]
    groups = []
    for start, end in zip(starts, [*starts[1:], len(labels)], strict=True):
        negatives = list(range(start + 2, end))
        if hard is not None:
            negatives = list(itertools.islice(itertools.cycle(negatives), hard))
        groups.append((start, start + 1, negatives))
    total = torch.zeros((), dtype=torch.float64)
    for mine in groups:
        anchor, positive, _ = mine
        s_positive = e[anchor] @ e[positive]
        terms = []
        for other in groups:
            if not use_batch and other is not mine:
                continue
            terms += [e[anchor] @ e[d] for d in other[2]]
            terms += [e[anchor] @ e[other[1]]] if other is not mine else []
            if qq and other is not mine:
                terms.append(e[anchor] @ e[other[0]])
            if dd:
                terms += [e[positive] @ e[d] for d in other[2]]
                terms += [e[positive] @ e[other[1]]] if other is not mine else []
        if mask:
            terms = [s for s in terms if s.item() <= s_positive.item() + margin]
        z = torch.stack([s_positive, *terms]).div(temperature).exp().sum()
        total = total - (s_positive / temperature - z.log())
    return total


@pytest.mark.parametrize("labels", [LABELS, FULL])
@pytest.mark.parametrize(("qq", "dd"), list(itertools.product((False, True), (False, True))))
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_it_is_its_formula_over_the_whole_batch(
    labels: list[int], qq: bool, dd: bool, mask: bool, temperature: float
) -> None:
    e = vectors(len(labels))
    result = loss(
        labels, e, temperature=temperature, include_qq=qq, include_dd=dd, mask_fake_negative=mask, fake_neg_margin=0.05
    )
    wanted = by_hand(labels, e, temperature, True, None, mask, 0.05, qq, dd)
    torch.testing.assert_close(result.loss_sum, wanted)
    torch.testing.assert_close(torch.autograd.grad(result.loss_sum, e), torch.autograd.grad(wanted, e))
    assert result.denominator == labels.count(1)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("hard", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("use_batch", [False, True])
def test_groups_get_as_many_negatives_as_asked_for(hard: int | None, mask: bool, use_batch: bool) -> None:
    e = vectors(len(FULL))
    options: Any = {"use_batch": use_batch, "hard_negatives": hard, "mask_fake_negative": mask}
    result = loss(FULL, e, **options)
    wanted = by_hand(FULL, e, 0.1, use_batch, hard, mask, 0.1, False, False)
    torch.testing.assert_close(result.loss_sum, wanted)
    torch.testing.assert_close(torch.autograd.grad(result.loss_sum, e), torch.autograd.grad(wanted, e))


def test_negatives_are_repeated_from_the_first_to_the_last_and_the_positive_never() -> None:
    from twinkle_losses.infonce import _groups

    groups = _groups(torch.tensor([1, 0, 0, 0, 0]), 5, hard_negatives=7)
    assert groups.documents == [1, 2, 3, 4, 2, 3, 4, 2]
    assert groups.anchors == [0]
    assert groups.positives == [0]
    assert _groups(torch.tensor([1, 0, 0, 0, 0]), 5, hard_negatives=2).documents == [1, 2, 3]


def test_a_masked_group_alone_is_certain_of_its_positive() -> None:
    e = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], requires_grad=True)
    result = loss([1, 0, 0], e, mask_fake_negative=True)
    result.loss_sum.backward()
    assert result.loss_sum.item() == 0.0
    assert e.grad is not None
    assert not e.grad.any()


def test_a_group_of_two_has_a_closed_form() -> None:
    e = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    result = loss([1, 0, 1, 0], e, temperature=0.5)
    assert result.loss_sum.item() == pytest.approx(2 * math.log(1 + math.exp(-2)), rel=1e-12)


def test_groups_apart_add_up_over_any_split_between_groups() -> None:
    e = vectors(len(FULL))
    whole = loss(FULL, e, use_batch=False)
    parts = [loss(FULL[part], e[part], use_batch=False) for part in (slice(0, 4), slice(4, None))]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    assert sum(part.denominator for part in parts) == whole.denominator


def test_only_groups_apart_may_be_split() -> None:
    assert InfonceLoss.splittable is False
    assert InfonceLoss(use_batch=True).splittable is False
    assert InfonceLoss(use_batch=False).splittable is True


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 0], "row 0 begins no group"),
        ([1, 0, 1], "the group at row 2 has no positive"),
        ([1, 1, 0], "the group at row 0 has no positive"),
        ([1, 0, 2], "the label of row 2 is 2; it must be 1"),
        ([1, 0], r"labels have the shape \[2\] for 3 embeddings"),
        ([[1, 0, 0]] * 3, r"labels have the shape \[3, 3\]"),
    ],
)
def test_labels_that_make_no_groups_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        loss(labels, torch.eye(3))


def test_a_group_without_negatives_cannot_have_hard_ones() -> None:
    with pytest.raises(DataError, match="the group at row 3 has no negatives, hard_negatives=2"):
        loss([1, 0, 0, 1, 0], torch.eye(5), hard_negatives=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature=0; it must be a finite number above 0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"hard_negatives": -1}, "hard_negatives=-1; it must be a whole number of at least 0"),
        ({"hard_negatives": True}, "hard_negatives=True"),
        ({"mask_fake_negative": "no"}, "mask_fake_negative='no'; it must be True or False"),
        ({"include_qq": None}, "include_qq=None; it must be True or False"),
        ({"fake_neg_margin": math.nan}, "fake_neg_margin=nan; it must be a finite number"),
        ({"use_batch": False, "include_qq": True}, "use_batch=False leaves out"),
        ({"use_batch": False, "include_dd": True}, "use_batch=False leaves out"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        InfonceLoss(**options)


def test_it_is_found_by_name_and_says_which_task_it_needs() -> None:
    found = registry().build("InfonceLoss", "loss")
    assert isinstance(found, InfonceLoss)
    with pytest.raises(TrainingStateError, match=r"needs outputs\['embeddings'\].*task='embedding'"):
        found({"labels": torch.ones(1)}, {"logps": torch.zeros(1, 1)})

"""GKD against loops over its formulas in plain floats; forms of the teacher, splits, masks, memory, refusals."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle._registry import registry
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle_losses.gkd import GKDLoss

ROWS, WIDTH, VOCABULARY, TOP = 4, 5, 7, 3
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def batch() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return a batch, the student's logits and the teacher's; row 2 trains nothing."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=draw)
    labels[:, -1] = labels[0, 1] = labels[1, 0] = labels[2] = -100
    student, teacher = (
        2 * torch.randn((ROWS, WIDTH, VOCABULARY), generator=draw, dtype=torch.float64) for _ in range(2)
    )
    return {"labels": labels}, student, teacher


def soft_max(logits: torch.Tensor, temperature: float) -> list[float]:
    powers = [math.exp(float(z) / temperature) for z in logits]
    return [power / sum(powers) for power in powers]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def divergence(t: list[float], s: list[float], beta: float) -> float:
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = [beta * a + (1 - beta) * b for a, b in zip(t, s, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def events(t: list[float], s: list[float], top: int | None, rest: str) -> tuple[list[float], list[float]]:
    """Return the probabilities of what is told apart: all tokens, or the most probable ones and perhaps the rest."""
    if top is None:
        return t, s
    best = sorted(range(len(t)), key=lambda v: -t[v])[:top]
    others = [v for v in range(len(t)) if v not in best]
    if rest == "bucket" and others:
        return [[p[v] for v in best] + [sum(p[v] for v in others)] for p in (t, s)]  # type: ignore[return-value]
    return [[p[v] / sum(p[w] for w in best) for v in best] for p in (t, s)]  # type: ignore[return-value]


def by_hand(
    labels: torch.Tensor, student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, *, beta: float,
    temperature: float = 1.0, top: int | None = None, rest: str = "bucket",
) -> tuple[float, int, dict[str, float]]:  # fmt: skip
    total, count, numbers = 0.0, 0, {"kl": 0.0, "reverse_kl": 0.0}
    for row, column in itertools.product(range(ROWS), range(WIDTH)):
        if labels[row, column] == -100:
            continue
        t, s = (soft_max(logits[row, column], temperature) for logits in (teacher, student))
        t, s = events(t, s, top, rest)
        total += float(weights[row, column]) * divergence(t, s, beta)
        numbers["kl"] += kl(t, s)
        numbers["reverse_kl"] += kl(s, t)
        count += 1
    return total, count, numbers


def top_of(teacher: torch.Tensor, k: int = TOP, temperature: float = 1.0) -> dict[str, Any]:
    best = (teacher / temperature).log_softmax(-1).topk(k, dim=-1)
    return {"teacher_topk_logprobs": best.values, "teacher_topk_indices": best.indices}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "loss_scale"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("form", ["whole", "topk", "bucket", "renormalize"])
def test_it_is_its_formula(form: str, beta: float, temperature: float, weighted: bool) -> None:
    inputs, student, teacher = batch()
    weights = torch.ones(inputs["labels"].shape, dtype=torch.float64)
    if weighted:
        weights = inputs["loss_scale"] = torch.rand(weights.shape, generator=torch.Generator().manual_seed(1)).double()
    rest: Any = "renormalize" if form == "renormalize" else "bucket"
    given: dict[str, Any] = {"teacher_logits": teacher}
    if form == "topk":
        given["topk"] = TOP
    elif form != "whole":
        given = top_of(teacher, temperature=temperature)
    loss = GKDLoss(beta, temperature, chunk_size=3, rest=rest)
    found = loss(inputs, {"logits": student}, **given)  # type: ignore[arg-type]
    top = None if form == "whole" else TOP
    total, count, numbers = by_hand(
        inputs["labels"], student, teacher, weights, beta=beta, temperature=temperature, top=top, rest=rest
    )
    assert found.loss_sum.item() == pytest.approx(total, rel=1e-11)
    assert found.denominator == count
    assert found.metrics == pytest.approx(numbers, rel=1e-11)


@pytest.mark.sample(2)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("form", ["whole", "bucket", "renormalize"])
def test_its_gradient_is_that_of_its_value_and_none_where_nothing_is_trained(form: str, beta: float) -> None:
    inputs, student, teacher = batch()
    inputs["labels"], student, teacher = inputs["labels"][:2, :3], student[:2, :3], teacher[:2, :3]
    loss = GKDLoss(beta, 1.3, chunk_size=2, rest="renormalize" if form == "renormalize" else "bucket")
    given = {"teacher_logits": teacher} if form == "whole" else top_of(teacher)

    def value(leaf: torch.Tensor) -> torch.Tensor:
        return loss(inputs, {"logits": leaf}, **given).loss_sum  # type: ignore[arg-type]

    leaf = student.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (leaf,))
    gradient = torch.autograd.grad(value(leaf), leaf)[0]
    masked = inputs["labels"] == -100
    assert not gradient[masked].any()
    assert bool(gradient[~masked].any(-1).all())


@pytest.mark.parametrize("beta", BETAS)
def test_the_bucket_is_a_lower_bound_that_grows_with_k_and_is_exact_at_the_whole_vocabulary(beta: float) -> None:
    inputs, student, teacher = batch()
    loss = GKDLoss(beta)
    whole = loss(inputs, {"logits": student}, teacher_logits=teacher).loss_sum.item()  # type: ignore[arg-type]
    found = [
        loss(inputs, {"logits": student}, **top_of(teacher, k)).loss_sum.item()  # type: ignore[arg-type]
        for k in range(1, VOCABULARY + 1)
    ]
    assert found[:-2] == sorted(found[:-2])
    assert 0 < found[0] < found[-3] < 0.9999 * whole
    assert found[-2:] == pytest.approx([whole, whole], rel=1e-12)  # one other token is no bucket, but itself


def test_the_student_that_is_the_teacher_pays_nothing() -> None:
    inputs, student, _ = batch()
    for beta, rest in itertools.product(BETAS, ("bucket", "renormalize")):
        for given in ({"teacher_logits": student}, top_of(student)):
            leaf = student.clone().requires_grad_()
            found = GKDLoss(beta, rest=rest)(inputs, {"logits": leaf}, **given)  # type: ignore[arg-type]
            assert found.loss_sum.item() == pytest.approx(0, abs=1e-12)
            assert float(torch.autograd.grad(found.loss_sum, leaf)[0].abs().max()) < 1e-12


def test_every_form_of_a_teacher_gives_the_same() -> None:
    inputs, student, teacher = batch()
    mask = inputs["labels"] != -100
    inputs["attention_mask"] = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    inputs["attention_mask"][1, 4:] = 0
    longer = torch.cat([teacher, teacher.new_full((ROWS, 2, VOCABULARY), float("nan"))], 1)
    lists: list[list[Any]] = [
        [row[kept] for row, kept in zip(teacher, mask, strict=True)],
        [row[:4] if at == 1 else row for at, row in enumerate(teacher)],
        teacher.tolist(),
        [None if not kept.any() else row for row, kept in zip(longer, mask, strict=True)],
    ]
    wanted = GKDLoss()(inputs, {"logits": student}, teacher_logits=teacher)  # type: ignore[arg-type]
    for form in (longer, *lists):
        found = GKDLoss()(inputs, {"logits": student}, teacher_logits=form)  # type: ignore[arg-type]
        assert found.loss_sum.item() == pytest.approx(wanted.loss_sum.item(), rel=1e-6)
    top = top_of(teacher)
    wanted = GKDLoss()(inputs, {"logits": student}, **top)  # type: ignore[arg-type]
    for pick in (lambda t: t.tolist(), lambda t: [row[kept] for row, kept in zip(t, mask, strict=True)]):
        found = GKDLoss()(inputs, {"logits": student}, **{name: pick(value) for name, value in top.items()})
        assert found.loss_sum.item() == pytest.approx(
            wanted.loss_sum.item(), rel=1e-6
        )  # plain numbers are read as float32


def test_rows_padded_on_the_left_read_the_last_columns_of_a_longer_teacher() -> None:
    inputs, student, teacher = batch()
    inputs["attention_mask"] = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    inputs["attention_mask"][1, 0] = 0
    wanted = GKDLoss()(inputs, {"logits": student}, teacher_logits=teacher)  # type: ignore[arg-type]
    longer = torch.cat([torch.full((ROWS, 2, VOCABULARY), float("nan")).double(), teacher], 1)
    found = GKDLoss()(inputs, {"logits": student}, teacher_logits=longer)  # type: ignore[arg-type]
    assert found.loss_sum.item() == wanted.loss_sum.item()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "topk"])
def test_any_split_adds_up_whatever_the_chunk(beta: float, whole: bool) -> None:
    inputs, student, teacher = batch()
    given: dict[str, Any] = {"teacher_logits": teacher} if whole else top_of(teacher)
    wanted = GKDLoss(beta)(inputs, {"logits": student}, **given)  # type: ignore[arg-type]
    for bounds, chunk in (([0, 1, 2, 3, 4], 1), ([0, 3, 4], 2), ([0, 4], 1000)):
        parts = [
            GKDLoss(beta, chunk_size=chunk)(
                {"labels": inputs["labels"][a:b]},  # type: ignore[arg-type]
                {"logits": student[a:b]},
                **{name: value[a:b] for name, value in given.items()},
            )
            for a, b in itertools.pairwise(bounds)
        ]
        assert float(sum(part.loss_sum for part in parts)) == pytest.approx(wanted.loss_sum.item(), rel=1e-12)
        assert sum(part.denominator for part in parts) == wanted.denominator
        for name, value in wanted.metrics.items():
            assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -200.0])
@pytest.mark.parametrize("beta", BETAS)
def test_what_stands_where_nothing_is_trained_is_never_read(beta: float, junk: float) -> None:
    inputs, student, teacher = batch()
    masked = (inputs["labels"] == -100)[..., None]
    wanted = GKDLoss(beta)(inputs, {"logits": student}, teacher_logits=teacher)  # type: ignore[arg-type]
    leaf = student.masked_fill(masked, junk).requires_grad_()
    found = GKDLoss(beta)(inputs, {"logits": leaf}, teacher_logits=teacher.masked_fill(masked, junk))  # type: ignore[arg-type]
    assert found.loss_sum.item() == wanted.loss_sum.item()
    assert bool(torch.isfinite(torch.autograd.grad(found.loss_sum, leaf)[0]).all())


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_teacher_that_rules_tokens_out_is_followed(beta: float) -> None:
    """Probabilities of 0 have terms of 0; only the reverse divergence is infinite, where the student has more."""
    inputs, student, teacher = batch()
    teacher[..., 2] = -math.inf
    small = torch.full_like(teacher, 1e-300).log().where(torch.isinf(teacher), teacher)
    leaf = student.clone().requires_grad_()
    found = GKDLoss(beta)(inputs, {"logits": leaf}, teacher_logits=teacher)  # type: ignore[arg-type]
    wanted = GKDLoss(beta)(inputs, {"logits": student}, teacher_logits=small)  # type: ignore[arg-type]
    assert found.loss_sum.item() == pytest.approx(wanted.loss_sum.item(), rel=1e-12)
    assert bool(torch.isfinite(torch.autograd.grad(found.loss_sum, leaf)[0]).all())
    assert GKDLoss(1.0)(inputs, {"logits": student}, teacher_logits=teacher).loss_sum.item() == math.inf  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_sure_distributions_stay_finite_in_small_precisions(beta: float, dtype: torch.dtype) -> None:
    inputs: Any = {"labels": torch.tensor([[1, 1]])}
    student = torch.tensor([[[90.0, 0.0, -9.0], [0.0, 0.0, 80.0]]], dtype=dtype)
    teacher = torch.tensor([[[0.0, 90.0, 9.0], [0.0, 0.0, 80.0]]], dtype=dtype)
    for given in ({"teacher_logits": teacher}, top_of(teacher, 1), top_of(teacher, 2)):
        leaf = student.clone().requires_grad_()
        found = GKDLoss(beta)(inputs, {"logits": leaf}, **given)
        gradient = torch.autograd.grad(found.loss_sum, leaf)[0]
        assert bool(torch.isfinite(found.loss_sum))
        assert bool(torch.isfinite(gradient).all())
        assert (gradient.dtype, found.loss_sum.dtype) == (dtype, torch.float32)


def test_no_trained_token_counts_nothing_and_keeps_the_graph() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    for given in ({"teacher_logits": torch.randn(2, 3, 4)}, {"teacher_logits": [[], []]}, top_of(torch.randn(2, 3, 4))):
        found = GKDLoss()({"labels": torch.full((2, 3), -100)}, {"logits": logits}, **given)
        assert (found.loss_sum.item(), found.denominator) == (0.0, 0)
        assert not torch.autograd.grad(found.loss_sum, logits)[0].any()


class Made(TorchDispatchMode):
    """Notes the sizes of the tensors that are made inside; those that only show another one are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        old = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        found = [tensor for tensor in (made if isinstance(made, tuple) else [made]) if isinstance(tensor, torch.Tensor)]
        self.sizes += [tensor.numel() for tensor in found if tensor.untyped_storage().data_ptr() not in old]
        return made


@pytest.mark.parametrize("form", ["whole", "topk", "given"])
def test_it_never_makes_more_than_a_chunk_of_the_vocabulary_but_the_gradient(form: str) -> None:
    rows, width, vocabulary, chunk = 4, 32, 500, 8
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn((rows, width, vocabulary), generator=draw) for _ in range(2))
    given: dict[str, Any] = top_of(teacher, 4) if form == "given" else {"teacher_logits": teacher}
    given |= {"topk": 4} if form == "topk" else {}
    inputs: Any = {"labels": torch.ones(rows, width).long()}
    leaf = student.requires_grad_()
    with Made() as forward:
        found = GKDLoss(chunk_size=chunk)(inputs, {"logits": leaf}, **given)
    assert max(forward.sizes) == chunk * vocabulary
    with Made() as backward:
        found.loss_sum.backward()
    assert [size for size in backward.sizes if size > chunk * vocabulary] == [leaf.numel()]


WHOLE = {"teacher_logits": torch.zeros(ROWS, WIDTH, VOCABULARY)}
LOGPS, IDS = torch.full((ROWS, WIDTH, 2), -2.0), torch.tensor([0, 1]).expand(ROWS, WIDTH, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "GKDLoss: the teacher came as nothing; pass either teacher_logits=.*topk_logprobs=k"),
        (
            {**WHOLE, "teacher_topk_logprobs": LOGPS},
            "the teacher came as teacher_logits and teacher_topk_logprobs; pass either",
        ),
        ({"teacher_topk_logprobs": LOGPS}, "the teacher came as teacher_topk_logprobs; pass either"),
        (
            {"teacher_logits": torch.zeros(ROWS, WIDTH, VOCABULARY + 1)},
            r"teacher_logits are over 8 tokens, the student's logits over 7; .*one tokenizer .*\[\.\.\., :7\]",
        ),
        ({"teacher_logits": torch.zeros(ROWS, WIDTH - 1, VOCABULARY)}, r"shape \[4, 4, 7\], the batch 4 rows of 5"),
        ({"teacher_logits": torch.zeros(ROWS - 1, WIDTH, VOCABULARY)}, r"have the shape \[3, 5, 7\], the batch 4 rows"),
        ({"teacher_logits": torch.zeros(ROWS, WIDTH)}, r"teacher_logits of row 0 have the shape \[5\]; give \[n, k\]"),
        ({"teacher_logits": [torch.zeros(2, VOCABULARY)] * ROWS}, "teacher_logits of row 0 has 2 numbers; give 3"),
        ({"teacher_logits": [torch.zeros(5, 7)] * 3}, "teacher_logits have 3 entries, the batch 4 rows"),
        ({"teacher_logits": 3}, "teacher_logits have a int, the batch 4 rows"),
        ({"teacher_logits": [["x"]] * ROWS}, "teacher_logits of row 0 are not a table of numbers"),
        ({**WHOLE, "topk": VOCABULARY + 1}, "topk=8; it must be a whole number from 1 to the vocabulary's size, 7"),
        ({**WHOLE, "topk": 0}, "topk=0; it must be"),
        ({"teacher_topk_logprobs": LOGPS, "teacher_topk_indices": IDS, "topk": 2}, "topk=2 cuts teacher_logits"),
        (
            {"teacher_topk_logprobs": LOGPS, "teacher_topk_indices": IDS[..., :1]},
            "teacher_topk_logprobs have 2 entries a token and teacher_topk_indices 1",
        ),
        (
            {"teacher_topk_logprobs": LOGPS.repeat(1, 1, 4), "teacher_topk_indices": IDS.repeat(1, 1, 4)},
            "from 1 to the vocabulary's size, 7",
        ),
        (
            {"teacher_topk_logprobs": LOGPS, "teacher_topk_indices": IDS * VOCABULARY},
            r"row 0 at position 0 hold a token outside the student's vocabulary of 7 \(\[0, 7\]\)",
        ),
        ({"teacher_topk_logprobs": LOGPS, "teacher_topk_indices": IDS * 0}, "row 0 at position 0 hold a token twice"),
        ({"teacher_topk_logprobs": LOGPS, "teacher_topk_indices": IDS / 2}, "are torch.float32 numbers; give tokens"),
        ({"teacher_topk_logprobs": -LOGPS, "teacher_topk_indices": IDS}, "are no log-probabilities, .* sum to 14.8"),
        (
            {"teacher_topk_logprobs": [torch.zeros(5, 2 + row // 3) for row in range(4)], "teacher_topk_indices": IDS},
            r"teacher_topk_logprobs have \[2, 3\] entries a token",
        ),
    ],
)  # fmt: skip
def test_a_teacher_that_is_missing_or_does_not_fit_is_refused(arguments: Any, message: str) -> None:
    inputs, student, _ = batch()
    with pytest.raises(ArgumentError, match=message):
        GKDLoss()(inputs, {"logits": student}, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "topk"])
def test_a_teacher_that_is_not_a_number_is_told_from_a_student_that_is_not(whole: bool) -> None:
    inputs, student, teacher = batch()
    given: dict[str, torch.Tensor] = {"teacher_logits": teacher} if whole else top_of(teacher)
    next(iter(given.values()))[3, 2] = float("nan")
    with pytest.raises(DataError, match=r"what the teacher says of row 3 at position 2 is not a number \(NaN\)"):
        GKDLoss(chunk_size=2)(inputs, {"logits": student}, **given)  # type: ignore[arg-type]
    student[3, 2, 0] = float("nan")
    found = GKDLoss()(inputs, {"logits": student}, teacher_logits=student.nan_to_num())  # type: ignore[arg-type]
    assert math.isnan(found.loss_sum.item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.1}, r"beta=1.1; it must be a number in \[0, 1\]"),
        ({"beta": -0.1}, "beta=-0.1; it must be a finite number of at least 0"),
        ({"temperature": 0}, "temperature=0; it must be a finite number above 0"),
        ({"chunk_size": 0}, "chunk_size=0; it must be a whole number of at least 1"),
        ({"ignore_index": 1.5}, "ignore_index=1.5"),
        ({"rest": "drop"}, "rest='drop'; it must be one of bucket, renormalize"),
        ({"teacher_mode": "full"}, "unknown argument 'teacher_mode'"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        registry().build("GKDLoss", "loss", **options)


def test_it_says_which_forward_it_needs() -> None:
    assert (GKDLoss.require_logits, GKDLoss.require_logps) == (True, False)
    with pytest.raises(TrainingStateError, match=r"needs outputs\['logits'\].*task='causal_lm'"):
        GKDLoss()({"labels": torch.ones(2, 1).long()}, {"embeddings": torch.zeros(2, 1)}, **WHOLE)
    with pytest.raises(DataError, match=r"logits are \[2, 4\]; it needs a model that gives \[B, T, V\]"):
        GKDLoss()({"labels": torch.ones(2, 1).long()}, {"logits": torch.zeros(2, 4)}, **WHOLE)

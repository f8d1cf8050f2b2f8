"""What the losses of policy gradients refuse, what they never read, and the degenerate batches that they survive."""

import inspect
import math
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import ArgumentError

NAMES = (
    "GRPOLoss", "GSPOLoss", "BNPOLoss", "DAPOLoss", "DRGRPOLoss", "PPOLoss", "CISPOLoss", "SAPOLoss", "ReinforceLoss",
)  # fmt: skip
every_loss = pytest.mark.parametrize("name", NAMES)
LABELS = torch.tensor([[5, 6, -100], [7, -100, -100], [-100, -100, -100]])  # the last one drew nothing
GOOD: dict[str, Any] = {"advantages": [1.0, -0.5, 2.0], "old_logps": [[-1.0, -2.0], [-0.5], []]}


def loss_of(name: str, **options: Any) -> Any:
    return registry().build(name, "loss", **options)


def outputs(rows: int = 3) -> dict[str, Any]:
    logps = torch.linspace(-2, -0.1, 9, dtype=torch.float64).reshape(3, 3)[:rows]
    return {"logps": logps.clone().requires_grad_(), "entropies": torch.ones(rows, 3, dtype=torch.float64)}


@every_loss
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"advantages": None}, "advantages are missing.*pass advantages="),
        ({"advantages": [1.0, 2.0]}, "advantages has 2 entries, the batch has 3 rows"),
        ({"advantages": [1.0, math.nan, 0.0]}, "advantages of row 1 holds nan at a trained token; leave the row out"),
        ({"advantages": [1.0, math.inf, 0.0]}, "advantages of row 1 holds inf"),
        ({"old_logps": [[-1.0, -2.0, -3.0, -4.0], [], []]}, "old_logps of row 1 has 0 numbers; give 1"),
        ({"old_logps": [[-1.0, -2.0]]}, "old_logps has 1 entries, the batch has 3 rows"),
        ({"old_logps": [[-1.0, -math.inf], [-0.5], []]}, "old_logps of row 0 holds -inf"),
        ({"ref_logps": [[-1.0, math.nan], [-0.5], []]}, "ref_logps of row 0 holds nan"),
        ({"rollout_logps": [[-1.0, -1.0], [math.nan], []]}, "rollout_logps of row 1 holds nan"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_refused(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: {message}"):
        loss_of(name)({"labels": LABELS}, outputs(), **(GOOD | changed))


@every_loss
def test_truncated_importance_sampling_needs_what_the_sampler_returned(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: tis_cap=2 .*rollout_logps are missing; pass rollout_logps="):
        loss_of(name, tis_cap=2.0)({"labels": LABELS}, outputs(), **GOOD)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "DAPOLoss"])
def test_a_distance_from_a_reference_needs_the_reference(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: beta=0.1 .*ref_logps are missing"):
        loss_of(name, beta=0.1)({"labels": LABELS}, outputs(), **GOOD)


@every_loss
@pytest.mark.parametrize(
    "advantages", [[0.0, 0.0, 0.0], [1.0, -0.5, math.nan]], ids=["all zero", "NaN of a row that trains nothing"]
)
def test_equal_rewards_and_empty_completions_give_finite_numbers(name: str, advantages: list[float]) -> None:
    ready = outputs()
    result = loss_of(name, tis_cap=2.0)(
        {"labels": LABELS}, ready, **(GOOD | {"advantages": advantages}), rollout_logps=GOOD["old_logps"]
    )
    gradient = torch.autograd.grad(result.loss_sum, ready["logps"])[0]
    assert bool(torch.isfinite(gradient).all())
    assert bool(gradient.any()) == any(advantages)
    assert not gradient[LABELS == -100].any()
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.denominator > 0


@every_loss
def test_a_row_alone_is_a_batch(name: str) -> None:
    result = loss_of(name)({"labels": LABELS[:1]}, outputs(1), old_logps=[[-1.0, -2.0]], advantages=[1.0])
    tokens = ("BNPOLoss", "DAPOLoss", "PPOLoss", "CISPOLoss")
    assert math.isfinite(result.loss_sum.item())
    assert result.denominator == (1024 if name == "DRGRPOLoss" else 2 if name in tokens else 1)


@every_loss
@pytest.mark.parametrize("junk", [-200.0, 200.0, math.nan, math.inf])
def test_what_stands_where_nothing_is_trained_is_never_read(name: str, junk: float) -> None:
    masked, ready = LABELS == -100, outputs()
    wide = {
        "advantages": torch.tensor([[1.0], [-0.5], [2.0]]).expand(3, 3).double(),
        "old_logps": ready["logps"].detach() - 0.1,
        "rollout_logps": ready["logps"].detach() + 0.1,
        "ref_logps": ready["logps"].detach() + 0.2,
    }
    options = {"entropy_coef": 0.1, "tis_cap": 2.0} | ({} if name == "DAPOLoss" else {"beta": 0.1})
    scale = torch.rand(3, 3, dtype=torch.float64)
    wanted = loss_of(name, **options)({"labels": LABELS, "loss_scale": scale}, ready, **wide)
    spoiled = {key: value.detach().masked_fill(masked, junk).requires_grad_() for key, value in ready.items()}
    result = loss_of(name, **options)(
        {"labels": LABELS, "loss_scale": scale.masked_fill(masked, junk)},
        spoiled,
        **{key: value.masked_fill(masked, junk) for key, value in wide.items()},
    )
    assert float(result.loss_sum.detach()) == float(wanted.loss_sum.detach())
    assert result.metrics == wanted.metrics
    for gradient in torch.autograd.grad(result.loss_sum, list(spoiled.values())):
        assert bool(torch.isfinite(gradient).all())
        assert not gradient[masked].any()


@every_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_absurd_ratios_stay_finite_in_float32(name: str, advantage: float) -> None:
    logps = torch.tensor([[-1.0, -900.0, 0.0]], requires_grad=True)
    far = {"old_logps": [[-900.0, -1.0]], "ref_logps": [[-900.0, -1.0]], "rollout_logps": [[-1.0, -900.0]]}
    options = {"tis_cap": 2.0} | ({} if name == "DAPOLoss" else {"beta": 0.1})
    result = loss_of(name, **options)(
        {"labels": torch.tensor([[3, 4, -100]])}, {"logps": logps}, advantages=[advantage], **far
    )
    assert bool(torch.isfinite(result.loss_sum))
    assert bool(torch.isfinite(torch.autograd.grad(result.loss_sum, logps)[0]).all())
    assert all(math.isfinite(value) for value in result.metrics.values())


PUBLISHED = {
    "GRPOLoss": {"epsilon": 0.2, "epsilon_high": None, "beta": 0.0, "entropy_coef": 0.0, "ignore_index": -100},
    "SAPOLoss": {"epsilon": 0.2, "beta": 0.0, "tau_pos": 1.0, "tau_neg": 1.0, "ignore_index": -100},
    "DRGRPOLoss": {"epsilon": 0.2, "beta": 0.0, "max_completion_length": 1024, "ignore_index": -100},
}
PUBLISHED |= dict.fromkeys(("GSPOLoss", "CISPOLoss", "BNPOLoss"), PUBLISHED["GRPOLoss"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_arguments_have_their_names_defaults_and_order(name: str) -> None:
    parameters = inspect.signature(type(loss_of(name))).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(PUBLISHED[name].items())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "DRGRPOLoss",
            {"max_completion_length": 0},
            "max_completion_length=0; it must be a whole number of at least 1",
        ),
        ("DRGRPOLoss", {"max_completion_length": 1.5}, "max_completion_length=1.5"),
        ("DRGRPOLoss", {"max_completion_length": math.inf}, "max_completion_length=inf"),
        ("DRGRPOLoss", {"max_completion_length": "9"}, "max_completion_length='9'"),
        ("PPOLoss", {"dual_clip": 1.2}, "dual_clip=1.2; it must be a finite number above 1.2"),
        ("PPOLoss", {"tis_cap": 0}, "tis_cap=0; it must be a finite number above 0"),
        ("SAPOLoss", {"tau_pos": 0}, "tau_pos=0; it must be a finite number above 0"),
        ("SAPOLoss", {"tau_neg": -1}, "tau_neg=-1"),
        ("DAPOLoss", {"epsilon_high": -1}, "epsilon_high=-1"),
        ("DAPOLoss", {"beta": 0.1}, "unknown argument 'beta'"),
        ("ReinforceLoss", {"per": "row"}, "per='row'; it must be one of sequence, token"),
        ("ReinforceLoss", {"importance_ratio": "no"}, "importance_ratio='no'; it must be True or False"),
    ],
)
def test_options_that_have_no_meaning_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        loss_of(name, **options)


def test_a_request_may_send_whole_numbers_as_fractions() -> None:
    assert loss_of("DRGRPOLoss", max_completion_length=512.0).max_completion_length == 512
    assert loss_of("ReinforceLoss", importance_ratio=1.0).importance_ratio is True


def test_cispo_counts_its_tokens_itself() -> None:
    with pytest.raises(ArgumentError, match="num_items_in_batch=3; the step divides by the trained tokens of all"):
        loss_of("CISPOLoss")({"labels": LABELS}, outputs(), **GOOD, num_items_in_batch=3)
    result = loss_of("CISPOLoss")({"labels": LABELS}, outputs(), **GOOD, num_items_in_batch=None)
    assert result.denominator == 3


def test_the_sampler_is_compared_with_the_trainer_even_where_nothing_is_weighted() -> None:
    loss = loss_of("GRPOLoss")
    measured = loss({"labels": LABELS}, outputs(), **GOOD, rollout_logps=[[-1.0, -2.5], [-0.5], []])
    plain = loss({"labels": LABELS}, outputs(), **GOOD)
    assert float(measured.loss_sum.detach()) == float(plain.loss_sum.detach())
    assert measured.metrics["rollout_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert "rollout_kl" not in plain.metrics

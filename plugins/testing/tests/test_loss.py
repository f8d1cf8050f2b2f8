"""Each check of a loss catches a loss that is broken in that way, and a good one passes them all."""

from typing import Any

import pytest
import torch

from twinkle.data_format import LossOutput
from twinkle.loss import Loss


class Good(Loss):
    """Negative log-likelihood, weighted by `loss_scale` and by advantages, if there are any."""

    skips_weight_zero = True

    def __call__(self, inputs: Any, outputs: Any, *, advantages: Any) -> LossOutput:
        mask = inputs["labels"] != -100
        terms = -outputs["logps"] * advantages
        if "loss_scale" in inputs:
            terms = terms * inputs["loss_scale"]
        return LossOutput(self.total(terms[mask], mask), self.count(mask))

    def total(self, terms: Any, mask: Any) -> Any:
        return terms.sum()

    def count(self, mask: Any) -> Any:
        return int(mask.sum())


class Plain(Good):
    """The same without advantages."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        return super().__call__(inputs, outputs, advantages=torch.ones_like(outputs["logps"]))


class Vector(Plain):
    """A vector in place of a sum."""

    def total(self, terms: Any, mask: Any) -> Any:
        return terms


class CountWithGradient(Plain):
    """A denominator in the graph."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        found = super().__call__(inputs, outputs)
        return LossOutput(found.loss_sum, outputs["logps"].sum() ** 2)


class Overflowing(Plain):
    """Infinite in float32."""

    def total(self, terms: Any, mask: Any) -> Any:
        return (terms + 200).exp().sum()


class HeldConstant(Plain):
    """A gradient that is not that of its value."""

    def total(self, terms: Any, mask: Any) -> Any:
        return (terms.detach() * terms).sum()


class Unmasked(Plain):
    """Adds what stands where nothing is trained."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        return LossOutput(-(outputs["logps"] - 1).sum(), int((inputs["labels"] != -100).sum()))


class CountsWidth(Plain):
    """Counts padding."""

    def count(self, mask: Any) -> Any:
        return mask.numel()


class DropsTokenZero(Plain):
    """Takes token 0 for padding."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        mask = inputs["labels"] > 0
        return LossOutput(-outputs["logps"][mask].sum(), int(mask.sum()))


class Mean(Plain):
    """Already divided."""

    def total(self, terms: Any, mask: Any) -> Any:
        return terms.mean()


class NotANumber(Plain):
    """0/0 where nothing is trained."""

    def total(self, terms: Any, mask: Any) -> Any:
        return terms.sum() / mask.sum() * mask.sum()


class NeedsScores(Plain):
    """Says that weight 0 needs no scores, and uses them."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        found = super().__call__(inputs, outputs)
        return LossOutput(found.loss_sum + outputs["logps"][inputs["labels"] != -100].sum(), found.denominator)


class Noisy(Plain):
    """Draws from torch's generator."""

    def total(self, terms: Any, mask: Any) -> Any:
        return (terms * torch.rand(terms.shape)).sum()


class InPlace(Plain):
    """Writes into the batch."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        inputs["labels"][0, 1] = -100
        return super().__call__(inputs, outputs)


class Unpicklable(Plain):
    """Holds a function of its own."""

    def __init__(self) -> None:
        self.weight = lambda: 1.0


class Remembers(Plain):
    """A running mean over whatever calls there are."""

    seen: float = 0.0

    def total(self, terms: Any, mask: Any) -> Any:
        type(self).seen += float(terms.detach().sum())
        return terms.sum() - type(self).seen


class SilentWithout(Good):
    """Declares advantages, and says nothing where they are missing."""

    def __call__(self, inputs: Any, outputs: Any, **kwargs: Any) -> LossOutput:
        return super().__call__(inputs, outputs, advantages=kwargs.get("advantages", torch.ones(())))


class Casting(Plain):
    """Computes in float32, as losses of many code bases do."""

    def total(self, terms: Any, mask: Any) -> Any:
        return (terms.float() ** 2).sum()


class CastingHeldConstant(Plain):
    """The same with another gradient."""

    def total(self, terms: Any, mask: Any) -> Any:
        return (terms.detach().float() * terms.float()).sum()


ADVANTAGES = {"row_inputs": {"advantages": torch.linspace(-1, 1, 24).reshape(4, 6)}}
BROKEN: dict[str, tuple[type, dict[str, Any]]] = {
    "shape": (Vector, {}),
    "denominator": (CountWithGradient, {}),
    "finite": (Overflowing, {}),
    "gradient": (HeldConstant, {}),
    "masked_positions": (Unmasked, {}),
    "padding": (CountsWidth, {}),
    "token_zero": (DropsTokenZero, {}),
    "split": (Mean, {}),
    "nothing_to_train": (NotANumber, {}),
    "weight_zero": (NeedsScores, {}),
    "deterministic": (Noisy, {}),
    "inputs_left_alone": (InPlace, {}),
    "pickle": (Unpicklable, {}),
    "tenants": (Remembers, {}),
    "declared_inputs": (SilentWithout, ADVANTAGES),
}


def test_a_good_loss_passes(passes: Any) -> None:
    passes("loss", Good, **ADVANTAGES)
    passes("loss", Plain, {"declared_inputs"})


def test_the_ids_of_tokens_are_exchanged_in_logits_too(passes: Any, catches: Any) -> None:
    class OfLogits(Loss):
        """Negative log-likelihood out of logits."""

        require_logps = False
        require_logits = True
        first = -99

        def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
            labels = inputs["labels"]
            mask = (labels != -100) & (labels > self.first)
            every = outputs["logits"].log_softmax(-1)
            terms = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            return LossOutput(-terms[mask].sum(), int(mask.sum()))

    class WithoutZero(OfLogits):
        """The same without token 0."""

        first = 0

    skip = {"pickle": "it is made in a test"}
    passes("loss", OfLogits, {"declared_inputs", "weight_zero", *skip}, skip=skip)
    catches("loss", "token_zero", WithoutZero)


def test_a_loss_that_casts_to_float32_is_held_to_what_float32_can(passes: Any, catches: Any) -> None:
    passes("loss", Casting, {"declared_inputs"})
    catches("loss", "gradient", CastingHeldConstant)


def test_a_function_and_an_instance_are_held_to_the_same(passes: Any) -> None:
    passes("loss", Plain(), {"declared_inputs", "unknown_argument"})


@pytest.mark.parametrize("check", BROKEN)
def test_a_broken_loss_is_caught(check: str, catches: Any) -> None:
    component, example = BROKEN[check]
    catches("loss", check, component, **example)


def test_every_check_has_a_loss_that_breaks_it(own_checks: Any) -> None:
    assert set(BROKEN) == own_checks("loss")


def test_the_older_form_is_read(passes: Any) -> None:
    def older(inputs: Any, outputs: Any) -> Any:
        """Sum and count in a dict."""
        mask = inputs["labels"] != -100
        return {"loss": -outputs["logps"][mask].sum(), "num_tokens": int(mask.sum())}

    skip = {"pickle": "it is made in a test", "nothing_to_train": "0 tokens mean a mean in this form"}
    passes("loss", older, {"declared_inputs", "unknown_argument", "weight_zero", *skip}, skip=skip)


@pytest.mark.parametrize("together", [2, 3, 5])
def test_rows_that_belong_together_are_not_split(together: int, passes: Any, catches: Any) -> None:
    class Groups(Loss):
        """The square of a group's log-likelihood."""

        rows_together = together

        def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
            mask = inputs["labels"] != -100
            by_row = torch.where(mask, outputs["logps"], 0.0).sum(1)
            groups = by_row.reshape(-1, together).sum(1)
            return LossOutput(groups.square().sum(), int(mask.any(1).sum()))

    class Forgets(Groups):
        """The same, cut anywhere."""

        rows_together = 1

    skip = {"pickle": "it is made in a test"}
    passes("loss", Groups, {"declared_inputs", "weight_zero", *skip}, skip=skip)
    catches("loss", "split", Groups, inputs={"labels": torch.zeros(together + 1, 3, dtype=torch.int64)})
    if together == 2:
        catches("loss", "split", Forgets)

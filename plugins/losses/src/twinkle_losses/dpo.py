"""Direct preference optimization: pairs of a chosen and a rejected row."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError
from twinkle.loss import Loss
from twinkle_losses.options import flag, label_to_ignore, number, score
from twinkle_losses.pairs import Pairs, logp_numbers, reward_numbers, weigh
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

LossType = Literal["sigmoid", "hinge", "ipo", "kto_pair"]


class DPOLoss(Loss):
    """Preference loss over pairs of rows `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, averaged over the pairs.

    With c and r the log-ratios of the chosen and the rejected row, each the sum of logp_t - ref_t over its trained
    tokens (times `loss_scale`, where the batch has it), and h = c - r, a pair's term is

    - "sigmoid": -(1 - e) log s(beta h) - e log s(-beta h), s the logistic function and e = `label_smoothing` (DPO,
      arXiv:2305.18290, eq. 7; e above 0 is conservative DPO: a pair is the wrong way round with probability e)
    - "hinge": max(0, 1 - beta h) (SLiC's hinge on normalized log-ratios, RSO, arXiv:2309.06657)
    - "ipo": (h - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17, where beta is tau)
    - "kto_pair": (1 - s(beta c)) + s(beta r) (KTO, arXiv:2402.01306, eq. 8, for a pair, with the reference point z_0
      at 0; an estimate of z_0 from the batch would depend on how the batch is cut)

    plus `sft_weight` times the mean of -logp_t over the chosen row's trained tokens (arXiv:2404.19733, eq. 1).
    `loss_sum` is the sum over pairs, `denominator` the number of pairs that train something: a pair of which neither
    row has a trained token counts nothing.

    `metrics`, sums over pairs as well: `rewards/chosen` (beta c), `rewards/rejected` (beta r), `rewards/margins`
    (beta h), `rewards/accuracies` (1 where h > 0), `logps/chosen` and `logps/rejected` (sums of the rows'
    log-probabilities), and `nll` with `sft_weight`.

    Args:
        beta: how much the distance from the reference costs, above 0.
        label_smoothing: e in [0, 0.5), with "sigmoid" only.
        ignore_index: a label that is not trained, in addition to -100.
        loss_type: one of the terms above.
        reference_free: leave the reference out: ref_t = 0.
        sft_weight: weight of the chosen rows' likelihood, against its displacement.

    Raises:
        ArgumentError: an option is outside its range.
    """

    rows_together = 2
    group_inputs = ("ref_chosen_logps", "ref_rejected_logps")

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        loss_type: LossType = "sigmoid",
        reference_free: bool = False,
        sft_weight: float = 0.0,
    ) -> None:
        what = type(self).__name__
        if loss_type not in get_args(LossType):
            raise ArgumentError(f"{what}: loss_type={loss_type!r}; it must be one of {', '.join(get_args(LossType))}")
        self.beta = number(self, "beta", beta, above=0)
        self.label_smoothing = number(self, "label_smoothing", label_smoothing, least=0, below=0.5)
        if self.label_smoothing and loss_type != "sigmoid":
            raise ArgumentError(
                f"{what}: label_smoothing={label_smoothing:g} has a meaning for loss_type='sigmoid' only, not for "
                f"{loss_type!r}; leave one of them out"
            )
        self.ignore_index = label_to_ignore(self, ignore_index)
        self.loss_type = loss_type
        self.reference_free = flag(self, "reference_free", reference_free)
        self.sft_weight = number(self, "sft_weight", sft_weight, least=0)

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        ref_outputs: Mapping[str, Any] | None = None,
        ref_logps: Any = None,
        ref_chosen_logps: Any = None,
        ref_rejected_logps: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch of whole pairs.

        The reference comes in one of three forms; with `reference_free`, none is read.

        Args:
            inputs: `labels` int64 `[B, T]`, B even; optional `loss_scale` float32 `[B, T]`.
            outputs: `logps` float32 `[B, T]`.
            ref_outputs: what a reference model's forward gave for the same rows; its `logps` are `ref_logps`.
            ref_logps: `[B, T]`, or a list with a list for each row, of as many numbers as the row has trained tokens,
                or of T and more; values at untrained positions are not read.
            ref_chosen_logps: `[B / 2]`, sums over the trained tokens of the chosen rows.
            ref_rejected_logps: the same of the rejected rows.

        Raises:
            ArgumentError: the reference is missing, comes in several forms, does not fit, or is NaN or infinite where
                something is trained; or B is odd.
            DataError: only one row of a pair has trained tokens.
            TrainingStateError: the forward was of another task.
        """
        logps = score(inputs, outputs, "logps", self)
        where = Trained.of(inputs, logps, self.ignore_index, self)
        pairs = Pairs.of(where)
        reference = self._reference(ref_outputs, ref_logps, ref_chosen_logps, ref_rejected_logps)
        policy = weigh(where.fill(logps), inputs).sum(1)
        ratios = policy
        if "ref_logps" in reference:
            tokens = where.aligned(reference, logps, broadcast=False)
            ratios = weigh(where.fill(logps - tokens["ref_logps"]), inputs).sum(1)
        elif reference:
            ratios = policy - pairs.interleave(reference, logps)
        chosen, rejected = pairs.split(ratios)
        terms = self._terms(chosen, rejected)
        numbers = reward_numbers(self.beta, chosen, rejected) | logp_numbers(*pairs.split(policy))
        if self.sft_weight:
            nll, _ = pairs.split(where.means(weigh(-where.fill(logps), inputs)))
            terms = terms + self.sft_weight * nll
            numbers["nll"] = nll.detach()
        return LossOutput(pairs.total(terms), pairs.count, pairs.numbers(numbers))

    def _terms(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        """Return the term of each pair `[P]` from the log-ratios of its rows."""
        from torch.nn.functional import logsigmoid

        margin = self.beta * (chosen - rejected)
        if self.loss_type == "hinge":
            return (1 - margin).relu()
        if self.loss_type == "ipo":
            return (chosen - rejected - 0.5 / self.beta).square()
        if self.loss_type == "kto_pair":
            return (-self.beta * chosen).sigmoid() + (self.beta * rejected).sigmoid()
        e = self.label_smoothing
        return -(1 - e) * logsigmoid(margin) - (e * logsigmoid(-margin) if e else 0)

    def _reference(self, ref_outputs: Any, ref_logps: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
        """Return the reference by name: `ref_logps`, or the two of pairs, or nothing with `reference_free`."""
        what = type(self).__name__
        given = {
            "ref_outputs": ref_outputs,
            "ref_logps": ref_logps,
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if self.reference_free:
            return {}
        if not given:
            raise ArgumentError(
                f"{what}: the reference is missing; pass ref_outputs= (what forward_only(disable_lora=True), or a "
                "reference model, returned for the same rows), ref_logps= ('base' where many adapters share a model), "
                "or ref_chosen_logps= and ref_rejected_logps=; or build it with reference_free=True"
            )
        if given.keys() == {"ref_outputs"}:
            found = ref_outputs.get("logps") if isinstance(ref_outputs, Mapping) else None
            if found is None:
                shown = sorted(ref_outputs) if isinstance(ref_outputs, Mapping) else type(ref_outputs).__name__
                raise ArgumentError(f"{what}: ref_outputs has no 'logps' (it is {shown}); pass what forward_only gave")
            return {"ref_logps": found}
        if given.keys() not in ({"ref_logps"}, {"ref_chosen_logps", "ref_rejected_logps"}):
            raise ArgumentError(
                f"{what}: the reference came as {' and '.join(given)}; pass either ref_outputs, or ref_logps, or both "
                "ref_chosen_logps and ref_rejected_logps"
            )
        return given

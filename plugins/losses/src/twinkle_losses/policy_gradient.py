"""What all losses of policy gradients share: ratios, distances, entropy, the sampler's own probabilities, and means."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError
from twinkle.loss import Loss
from twinkle_losses.options import label_to_ignore, number, score
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

_LIMIT = 20.0  # e^20 is 5e8: larger ratios have no further meaning, and float32 would overflow at e^89


class PolicyGradientLoss(Loss):
    """A policy term for each trained token, with a distance from a reference and an entropy, averaged exactly.

    With r_t = exp(logp_t - old_t), A_t the advantage, P(r_t, A_t) the subclass's policy term (`_policy_terms`) and
    k_t = exp(ref_t - logp_t) - (ref_t - logp_t) - 1 (k3 of joschu.net/blog/kl-approx.html), a trained token's term is

        l_t = w_t P(r_t, A_t) + beta k_t - entropy_coef H_t

    w_t is 1, or with `tis_cap` min(exp(old_t - rollout_t), tis_cap), held constant: truncated importance sampling,
    where the engine that sampled (rollout_t) computes other probabilities for the same weights than the one that trains
    (old_t). It is that of Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025
    (fengyao.notion.site/off-policy-rl). Where the batch has `loss_scale`, l_t is multiplied by it; counts stay.

    `loss_sum` is the sum over sequences of the mean of l_t over the sequence's trained tokens, `denominator` the number
    of sequences that train something; with the class attribute `over_tokens` they are the sum of all l_t and the number
    of trained tokens. Both add up over any split of the rows.

    `metrics` are means of the same kind: `approx_kl` (r_t - log r_t - 1, an estimate of KL(old || now), since old drew
    the tokens: how far the policy has moved), `clip_ratio` (share of tokens that the loss clips, if it clips), `kl`
    (k_t, if `ref_logps` are given), `entropy` (with `entropy_coef`), `rollout_kl` (the same as `approx_kl`, of old_t
    against rollout_t, if `rollout_logps` are given: how far trainer and sampler disagree) and `tis_clip_ratio` (share
    of tokens at the cap, with `tis_cap`).

    Args:
        beta: weight of the KL term; above 0 it needs `ref_logps`.
        entropy_coef: weight of the entropy H_t of the model's distribution, which is rewarded; not 0 makes the
            forward prepare it.
        ignore_index: a label that is not trained, in addition to -100.
        tis_cap: the largest w_t, above 0 (2 is usual); needs `rollout_logps`.

    Raises:
        ArgumentError: an option is outside its range.
    """

    row_inputs = ("rollout_logps",)
    over_tokens: ClassVar[bool] = False

    def __init__(
        self, beta: float = 0.0, entropy_coef: float = 0.0, ignore_index: int = -100, tis_cap: float | None = None
    ) -> None:
        self.beta = number(self, "beta", beta, least=0)
        self.entropy_coef = number(self, "entropy_coef", entropy_coef)
        self.ignore_index = label_to_ignore(self, ignore_index)
        self.tis_cap = None if tis_cap is None else number(self, "tis_cap", tis_cap, above=0)
        self.require_entropy = self.entropy_coef != 0

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        ref_logps: Any = None,
        advantages: Any = None,
        rollout_logps: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        The four arguments are tensors `[B, T]`, `[B]` or `[B, 1]`, flat lists, or lists of lists: a row with one
        number has it at each trained position, and one with as many numbers as trained positions has them there in
        order, as a sampler returns them. Values at other positions are not read.

        Args:
            inputs: `labels` int64 `[B, T]`; optional `loss_scale` float32 `[B, T]`.
            outputs: `logps` float32 `[B, T]`, and `entropies` with `entropy_coef`.
            old_logps: log-probabilities under the weights that sampled; None is the current ones, so that every ratio
                is 1.
            ref_logps: those of the reference model, for the KL term and for `kl`.
            advantages: one a row, or one a token.
            rollout_logps: log-probabilities as the sampler computed them, where `old_logps` are the trainer's of the
                same weights; for `tis_cap` and `rollout_kl`.

        Raises:
            ArgumentError: `advantages` are missing, or `ref_logps` with `beta`, or `rollout_logps` with `tis_cap`;
                lengths do not fit; or a number at a trained token is NaN or infinite.
            TrainingStateError: the forward was of another task.
        """
        logps = score(inputs, outputs, "logps", self)
        where = Trained.of(inputs, logps, self.ignore_index, self)
        self._check(advantages, ref_logps, rollout_logps)
        given = {"advantages": advantages, "old_logps": old_logps, "ref_logps": ref_logps}
        rows = where.aligned(given | {"rollout_logps": rollout_logps}, logps)
        logps, weight = where.fill(logps), rows["advantages"]
        old = rows.get("old_logps", logps.detach())
        ratio = self._log_ratio(logps, old, where).clamp(-_LIMIT, _LIMIT).exp()
        terms = self._policy_terms(ratio, weight, logps)
        numbers = {"approx_kl": _kl(logps.detach() - old), **self._numbers(ratio.detach(), weight)}
        if "rollout_logps" in rows:
            weights, about = self._off_sampler(old - rows["rollout_logps"])
            terms, numbers = terms * weights, numbers | about
        if "ref_logps" in rows:
            numbers["kl"] = _kl(rows["ref_logps"] - logps)
            terms = terms + self.beta * numbers["kl"] if self.beta else terms
        if self.require_entropy:
            numbers["entropy"] = score(inputs, outputs, "entropies", self)
            terms = terms - self.entropy_coef * numbers["entropy"]
        if (scale := inputs.get("loss_scale")) is not None:
            terms = terms * where.fill(scale.to(terms))
        sums = {name: self._measured(values.detach(), where) for name, values in numbers.items()}
        return LossOutput(self._total(terms, where), self._denominator(where), _plain(sums))

    def _check(self, advantages: Any, ref_logps: Any, rollout_logps: Any) -> None:
        what = type(self).__name__
        if advantages is None:
            raise ArgumentError(
                f"{what}: advantages are missing, and without them there is nothing to learn; pass advantages=, one "
                "number a row or a token"
            )
        if self.beta and ref_logps is None:
            raise ArgumentError(
                f"{what}: beta={self.beta:g} weights the distance from a reference, but ref_logps are missing; pass "
                "ref_logps= (forward_only(disable_lora=True) of the same rows gives them as 'logps'), or set beta=0"
            )
        if self.tis_cap is not None and rollout_logps is None:
            raise ArgumentError(
                f"{what}: tis_cap={self.tis_cap:g} weights tokens by how far trainer and sampler disagree, but "
                "rollout_logps are missing; pass rollout_logps= (what the sampler returned) beside old_logps= (what "
                "forward_only gave for the same weights), or leave tis_cap out"
            )

    @abstractmethod
    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        """Return P(r_t, A_t) `[B, T]`, with gradient; where nothing is trained r is 1, and A and `logps` are 0."""

    def _numbers(self, ratio: "Tensor", advantages: "Tensor") -> "dict[str, Tensor]":
        """Return what the policy terms have for the log, `[B, T]` each: `clip_ratio` where something is clipped."""
        return {}

    def _log_ratio(self, logps: "Tensor", old: "Tensor", where: Trained) -> "Tensor":
        """Return log r_t `[B, T]`, 0 where nothing is trained."""
        return logps - old

    def _off_sampler(self, log_weight: "Tensor") -> "tuple[Tensor | float, dict[str, Tensor]]":
        """Return w_t for old_t - rollout_t `[B, T]`, and its metrics."""
        numbers = {"rollout_kl": _kl(log_weight)}
        if self.tis_cap is None:
            return 1.0, numbers
        weights = log_weight.clamp(max=_LIMIT).exp()
        return weights.clamp(max=self.tis_cap), numbers | {"tis_clip_ratio": (weights > self.tis_cap).to(weights)}

    def _total(self, terms: "Tensor", where: Trained) -> "Tensor":
        """Return what `_denominator` divides."""
        return where.sums(terms).sum() if self.over_tokens else where.means(terms).sum()

    def _denominator(self, where: Trained) -> int:
        """Return the number of trained tokens, or of sequences that train something."""
        return sum(where.counts) if self.over_tokens else where.sequences

    def _measured(self, values: "Tensor", where: Trained) -> "Tensor":
        """Return a number for the log, which `_denominator` divides too."""
        return self._total(values, where)


def _kl(difference: "Tensor") -> "Tensor":
    """Return exp(d) - d - 1 with d at most 20, 0 where d is 0."""
    bounded = difference.clamp(max=_LIMIT)
    return bounded.expm1() - bounded  # of numbers near 0, exp would leave nothing but its rounding


def _plain(sums: "dict[str, Tensor]") -> dict[str, float]:
    """Return numbers for tensors, with one wait for the device."""
    import torch

    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))

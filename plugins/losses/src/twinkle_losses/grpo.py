"""GRPO: clipped policy gradients with the advantages of a group."""

from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError
from twinkle.loss import Loss
from twinkle_losses.aligning import Trained
from twinkle_losses.options import label_to_ignore, number
from twinkle_losses.outputs import output

if TYPE_CHECKING:
    from torch import Tensor

_LIMIT = 20.0  # e^20 is 5e8: beyond it a ratio says no more than that, and float32 would overflow at e^89


class GRPOLoss(Loss):
    """Clipped policy gradient, averaged over the tokens of a sequence, then over the sequences of the whole step.

    With r_t = exp(logp_t - old_t), A_t the advantage and k_t = exp(ref_t - logp_t) - (ref_t - logp_t) - 1, a trained
    token's term is (GRPO, arXiv:2402.03300, eq. 3 and 4)

        l_t = - min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t) + beta k_t - entropy_coef H_t

    `loss_sum` is the sum over sequences of the mean of l_t over the sequence's trained tokens; `denominator` is the
    number of sequences that train something. A sequence without trained tokens counts nothing, in neither. Where the
    batch has `loss_scale`, l_t is multiplied by it, and the number of tokens stays.

    `metrics`, sums of sequence means as well: `clip_ratio` (share of tokens whose ratio is clipped, so that they have
    no policy gradient), `approx_kl` (k_t with old in the place of ref: how far the policy has moved since sampling),
    `kl` (k_t, if `ref_logps` are given), and `entropy` (with `entropy_coef`).

    Args:
        epsilon: how far a ratio may fall below 1.
        epsilon_high: how far it may rise above 1; None is `epsilon` (another value: DAPO's clip-higher,
            arXiv:2503.14476, eq. 10).
        beta: weight of the KL term; above 0 it needs `ref_logps`.
        entropy_coef: weight of the entropy H_t of the model's distribution, which is rewarded; not 0 makes the
            forward prepare it.
        ignore_index: a label that is not trained, beside -100, which never is.

    Raises:
        ArgumentError: an option is outside its range.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        self.epsilon = number(self, "epsilon", epsilon, least=0)
        high = epsilon if epsilon_high is None else epsilon_high
        self.epsilon_high = number(self, "epsilon_high", high, least=0)
        self.beta = number(self, "beta", beta, least=0)
        self.entropy_coef = number(self, "entropy_coef", entropy_coef)
        self.ignore_index = label_to_ignore(self, ignore_index)
        self.require_entropy = self.entropy_coef != 0

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        old_logps: Any = None,
        ref_logps: Any = None,
        advantages: Any = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        The three arguments are tensors `[B, T]`, `[B]` or `[B, 1]`, flat lists, or lists of lists: a row with one
        number has it at each trained position, and one with as many numbers as trained positions has them there in
        order, as a sampler returns them. What stands elsewhere is never read.

        Args:
            inputs: `labels` int64 `[B, T]`; optional `loss_scale` float32 `[B, T]`.
            outputs: `logps` float32 `[B, T]`, and `entropies` with `entropy_coef`.
            old_logps: log-probabilities at sampling time; None is the current ones, so that every ratio is 1.
            ref_logps: those of the reference model, for the KL term and for `kl`.
            advantages: one a row, or one a token.

        Raises:
            ArgumentError: `advantages` are missing, or `ref_logps` with `beta`, or lengths do not fit.
            TrainingStateError: the forward was of another task.
        """
        logps = output(outputs, "logps", self, "call with task='causal_lm', on rows with labels")
        where = Trained.of(inputs, logps, self.ignore_index, self)
        self._check(advantages, ref_logps)
        weight = where.align("advantages", advantages, logps)
        old = where.fill(logps.detach()) if old_logps is None else where.align("old_logps", old_logps, logps)
        log_ratio = self._log_ratio(logps, old, where)
        terms = self._policy_terms(log_ratio.clamp(-_LIMIT, _LIMIT).exp(), weight, logps)
        numbers = {"clip_ratio": self._clipped(log_ratio, weight), "approx_kl": _kl(-log_ratio.detach())}
        if ref_logps is not None:
            numbers["kl"] = _kl(where.fill(where.align("ref_logps", ref_logps, logps) - logps))
            terms = terms + self.beta * numbers["kl"] if self.beta else terms
        if self.require_entropy:
            numbers["entropy"] = output(outputs, "entropies", self, "the forward must prepare what the loss requires")
            terms = terms - self.entropy_coef * numbers["entropy"]
        if (scale := inputs.get("loss_scale")) is not None:
            terms = terms * scale.to(terms)
        sums = {name: self._total(values.detach(), where) for name, values in numbers.items()}
        return LossOutput(self._total(terms, where), self._denominator(where), _plain(sums))

    def _check(self, advantages: Any, ref_logps: Any) -> None:
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

    def _log_ratio(self, logps: "Tensor", old: "Tensor", where: Trained) -> "Tensor":
        """Return log r_t `[B, T]`, 0 where nothing is trained."""
        return where.fill(logps - old)

    def _policy_terms(self, ratio: "Tensor", advantages: "Tensor", logps: "Tensor") -> "Tensor":
        """Return each token's term `[B, T]` without KL and entropy; subclasses may need `logps` itself."""
        import torch

        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def _clipped(self, log_ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        """Return 1.0 where the clipped term is the smaller one, `[B, T]`."""
        ratio = log_ratio.detach().exp()
        high, low = ratio > 1 + self.epsilon_high, ratio < 1 - self.epsilon
        return ((high & (advantages > 0)) | (low & (advantages < 0))).to(ratio.dtype)

    def _total(self, terms: "Tensor", where: Trained) -> "Tensor":
        """Return what `_denominator` divides: the sum over sequences of the means over their tokens."""
        return where.means(terms).sum()

    def _denominator(self, where: Trained) -> int:
        """Return the number of sequences that train something."""
        return sum(count > 0 for count in where.counts)


def _kl(difference: "Tensor") -> "Tensor":
    """Return exp(d) - d - 1 with d at most 20 (k3 of joschu.net/blog/kl-approx.html), 0 where d is 0."""
    bounded = difference.clamp(max=_LIMIT)
    return bounded.exp() - bounded - 1


def _plain(sums: "dict[str, Tensor]") -> dict[str, float]:
    """Return numbers for tensors, with one wait for the device."""
    import torch

    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))

"""How far a policy has moved from the one that sampled, and how far trainer and sampler disagree."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.data_format import InputBatch, ModelOutput
from twinkle.errors import ArgumentError, Unsupported
from twinkle.metric import Metric
from twinkle_metrics.by_hand import as_batch

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle_torch.trained import Trained

_LIMIT = 20.0  # as in the losses: larger ratios have no further meaning, and e^20 does not overflow


class GRPOMetric(Metric):
    """Numbers about the trained tokens of a policy-gradient step, means over all of them and over all ranks.

    With lp the log-probability now, old the one in `old_logps`, d = lp - old bounded by 20, r = exp(d) and
    k = r - 1 - d (k3 of joschu.net/blog/kl-approx.html: it estimates KL(old || now), as tokens were drawn from old),
    the keys are, all behind `train/`:

    - `policy_confidence`, `mean_new_logp`: mean of exp(lp), of lp;
    - `mean_old_logp`, `logp_diff_mean`, `approx_kl`: mean of old, of d, of k;
    - `token_kl_max`, `token_ratio_max`: largest k, largest r;
    - `entropy`: mean entropy, where the loss has it prepared;
    - `clip_ratio_low`: share with r < 1 - epsilon and A < 0, `clip_ratio_high`: with r > 1 + epsilon_high and A > 0,
      `clip_ratio`: both: tokens that have no gradient;
    - `mismatch_kl`, `mismatch_logp_diff`, `mismatch_ratio_max`: trainer against sampler: mean k, mean of abs(d) and
      largest r with `old_logps` in the place of lp and `rollout_logps` in the place of old.

    Keys whose numbers were not given are missing. Without `rollout_logps`, where `old_logps` are the sampler's own, the
    mismatch is `approx_kl` of the first pass over a batch: before any update nothing else makes them differ.

    Args:
        device_mesh: the mesh of the model.
        process_group: the ranks to gather over.
        ignore_index: a label that is not trained, in addition to -100.
        temperature: only 1; give it to the forward, whose log-probabilities are scaled then.
        epsilon: the loss's bound below 1.
        epsilon_high: the loss's bound above 1; None is `epsilon`.
        top_k_kl: how many tokens of largest k to keep: after `calculate`, `high_kl_records` has a dict for each (rank,
            row and position since the last look, token, new_logp, old_logp, kl).

    Raises:
        ArgumentError: an option is outside its range.
        Unsupported: a temperature other than 1.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        process_group: Any = None,
        ignore_index: int = -100,
        temperature: float = 1.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        top_k_kl: int = 0,
    ) -> None:
        super().__init__(device_mesh, process_group)
        name = type(self).__name__
        if temperature != 1.0:
            raise Unsupported(
                f"{name}: temperature={temperature!r}; pass temperature= to forward_backward, which scales the "
                "log-probabilities that this metric reads"
            )
        for option, value in (("epsilon", epsilon), ("epsilon_high", epsilon_high or 0.0)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ArgumentError(f"{name}: {option}={value!r}; it is a finite number from 0")
        if isinstance(top_k_kl, bool) or not isinstance(top_k_kl, int) or top_k_kl < 0:
            raise ArgumentError(f"{name}: top_k_kl={top_k_kl!r}; it is a whole number from 0")
        self.ignore_index = ignore_index
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.top_k_kl = top_k_kl
        self.high_kl_records: list[dict[str, float]] = []
        self.reset()

    def accumulate(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        *,
        old_logps: Any = None,
        advantages: Any = None,
        rollout_logps: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the values of one pass.

        Args:
            inputs: `labels` int64 `[B, T]`.
            outputs: `logps` `[B, T]`, perhaps `entropies`.
            old_logps: as the losses take them.
            advantages: as the losses take them.
            rollout_logps: those of the sampler, where `old_logps` were computed by the trainer.
            **kwargs: not used.

        Raises:
            ArgumentError: an argument has not one entry a row, or another length; names row and lengths.
        """
        inputs, outputs = as_batch(inputs, outputs)
        labels, logps = inputs.get("labels"), outputs.get("logps")
        if logps is None or labels is None or labels.ndim != 2:
            return
        from twinkle_torch.trained import Trained

        new = logps.detach().double()
        where = Trained.of(inputs, new, self.ignore_index, self)
        self._rows += len(new)
        if not sum(where.counts):
            return
        given = {"old_logps": old_logps, "rollout_logps": rollout_logps, "advantages": advantages}
        found = {name: where.align(name, value, new) for name, value in given.items() if value is not None}
        sums = _Sums(where)
        most: dict[str, Tensor] = {}
        sums.mean("policy_confidence", new.exp())
        sums.mean("mean_new_logp", new)
        if (entropies := outputs.get("entropies")) is not None:
            sums.mean("entropy", entropies.detach().double())
        if (old := found.get("old_logps")) is not None:
            most |= self._moved(sums, new, old)
            self._clip(sums, where.fill(new - old), found.get("advantages"), where)
            self._keep(inputs, new, old, where)
        if (rollout := found.get("rollout_logps")) is not None:
            most |= _mismatch(sums, new if old is None else old, rollout)
        self._add(sums, most)

    def calculate(self) -> Mapping[str, float]:
        """Return the numbers over all ranks; nothing if no token was trained."""
        own = {"sums": self._sums, "counts": self._counts, "most": self._most, "records": self._records}
        parts = self.gather_results([own])
        self.reset()
        values = {}
        for name in dict.fromkeys(name for part in parts for name in part["counts"]):
            count = sum(part["counts"].get(name, 0) for part in parts)
            values[f"train/{name}"] = sum(part["sums"].get(name, 0.0) for part in parts) / count
        for name in dict.fromkeys(name for part in parts for name in part["most"]):
            values[f"train/{name}"] = max(part["most"][name] for part in parts if name in part["most"])
        records = [{"rank": rank, **record} for rank, part in enumerate(parts) for record in part["records"]]
        self.high_kl_records = sorted(records, key=lambda record: -record["kl"])[: self.top_k_kl]
        return values

    def reset(self) -> None:
        """Clear the accumulated values."""
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._most: dict[str, float] = {}
        self._records: list[dict[str, float]] = []
        self._rows = 0

    def _clipped(self, log_ratio: "Tensor", advantages: "Tensor", where: "Trained") -> "tuple[Tensor, Tensor, Tensor]":
        """Return where a ratio is clipped below and above, and what of it counts; all bool, `[B, T]` or `[B]`."""
        ratio = log_ratio.exp()
        low, high = ratio < 1 - self.epsilon, ratio > 1 + self.epsilon_high
        return low & (advantages < 0), high & (advantages > 0), where.mask

    def _clip(self, sums: "_Sums", log_ratio: "Tensor", advantages: "Tensor | None", where: "Trained") -> None:
        if advantages is None:
            return
        low, high, counted = self._clipped(log_ratio, advantages, where)
        sums.share("clip_ratio_low", low, counted)
        sums.share("clip_ratio_high", high, counted)
        sums.share("clip_ratio", low | high, counted)

    def _moved(self, sums: "_Sums", new: "Tensor", old: "Tensor") -> "dict[str, Tensor]":
        difference = sums.where.fill(new - old).clamp(-_LIMIT, _LIMIT)
        kl = _k3(difference)
        sums.mean("mean_old_logp", old)
        sums.mean("logp_diff_mean", difference)
        sums.mean("approx_kl", kl)
        return {"token_kl_max": kl.max(), "token_ratio_max": difference[sums.where.mask].max().exp()}

    def _keep(self, inputs: InputBatch, new: "Tensor", old: "Tensor", where: "Trained") -> None:
        """Keep the tokens of largest k."""
        if not self.top_k_kl:
            return
        kl = _k3((new - old).clamp(-_LIMIT, _LIMIT))
        places = where.mask.nonzero()
        chosen = places[kl[where.mask].topk(min(self.top_k_kl, len(places))).indices].tolist()
        before = self._rows - len(new)
        for row, position in chosen:
            record = {"row": before + row, "position": position, "token": int(inputs["labels"][row, position])}
            numbers = {"new_logp": new, "old_logp": old, "kl": kl}
            self._records.append(record | {name: float(value[row, position]) for name, value in numbers.items()})
        self._records = sorted(self._records, key=lambda record: -record["kl"])[: self.top_k_kl]

    def _add(self, sums: "_Sums", most: "Mapping[str, Tensor]") -> None:
        import torch

        numbers = torch.stack([*(value for value, _ in sums.found.values()), *most.values()]).tolist()
        for (name, (_, count)), value in zip(sums.found.items(), numbers, strict=False):
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + count
        for name, value in zip(most, numbers[len(sums.found) :], strict=True):
            self._most[name] = max(self._most.get(name, value), value)


class GSPOMetric(GRPOMetric):
    """`GRPOMetric` for `GSPOLoss`: the clip ratios are shares of sequences, by the geometric mean of their ratios.

    A sequence's advantage is the mean over its tokens.
    """

    def _clipped(self, log_ratio: "Tensor", advantages: "Tensor", where: "Trained") -> "tuple[Tensor, Tensor, Tensor]":
        trained = where.mask.any(1)
        means = where.means(log_ratio).clamp(-_LIMIT, _LIMIT)
        low, high, _ = super()._clipped(means, where.means(advantages), where)
        return low, high, trained


class CISPOMetric(GRPOMetric):
    """`GRPOMetric` for `CISPOLoss`: weights above 1 + epsilon_high are clipped for any advantage; none below.

    Clipped weights keep their gradient; the metric is the share of weights at the bound.
    """

    def _clipped(self, log_ratio: "Tensor", advantages: "Tensor", where: "Trained") -> "tuple[Tensor, Tensor, Tensor]":
        import torch

        high = log_ratio.exp() > 1 + self.epsilon_high
        return torch.zeros_like(high), high, where.mask


class _Sums:
    """Sums of one pass, with what divides each of them."""

    def __init__(self, where: "Trained") -> None:
        self.where = where
        self.found: dict[str, tuple[Tensor, int]] = {}

    def mean(self, name: str, values: "Tensor") -> None:
        """Add `values` `[B, T]` at trained positions."""
        self.found[name] = (self.where.sums(values).sum(), sum(self.where.counts))

    def share(self, name: str, chosen: "Tensor", counted: "Tensor") -> None:
        """Add how many of `counted` are `chosen`, both bool."""
        self.found[name] = ((chosen & counted).sum().double(), int(counted.sum()))


def _mismatch(sums: _Sums, trainer: "Tensor", sampler: "Tensor") -> "dict[str, Tensor]":
    difference = sums.where.fill(trainer - sampler).clamp(-_LIMIT, _LIMIT)
    sums.mean("mismatch_kl", _k3(difference))
    sums.mean("mismatch_logp_diff", difference.abs())
    return {"mismatch_ratio_max": difference[sums.where.mask].max().exp()}


def _k3(difference: "Tensor") -> "Tensor":
    return difference.expm1() - difference

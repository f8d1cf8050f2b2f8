"""Metrics: the contract `Metric`, and every installed metric by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.metric.base import Metric

__all__ = ["Metric"]

__getattr__, __dir__ = room(__name__, "metric")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_metrics.accuracy import Accuracy as Accuracy
    from twinkle_metrics.completion import CompletionRewardMetric as CompletionRewardMetric
    from twinkle_metrics.distillation import GKDMetric as GKDMetric
    from twinkle_metrics.embedding import EmbeddingMetric as EmbeddingMetric
    from twinkle_metrics.loss import LossMetric as LossMetric
    from twinkle_metrics.policy import CISPOMetric as CISPOMetric
    from twinkle_metrics.policy import GRPOMetric as GRPOMetric
    from twinkle_metrics.policy import GSPOMetric as GSPOMetric
    from twinkle_metrics.preference import DPOMetric as DPOMetric
    from twinkle_metrics.train import TrainMetric as TrainMetric

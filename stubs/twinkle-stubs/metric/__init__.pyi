# Written by `twinkle plugins types`; do not edit.
"""Metrics: the contract `Metric`, and every installed metric by name."""

from twinkle._registry import lazy_names
from twinkle.metric.base import Metric

__all__ = ["Metric"]


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

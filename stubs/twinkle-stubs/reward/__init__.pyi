# Written by `twinkle plugins types`; do not edit.
"""Rewards: the contract `Reward`, and every installed reward by name."""

from twinkle._registry import lazy_names
from twinkle.reward.base import Reward

__all__ = ["Reward"]


from twinkle_rewards.countdown import CountdownReward as CountdownReward
from twinkle_rewards.exact import ExactMatchReward as ExactMatchReward
from twinkle_rewards.exact import GSM8KAccuracyReward as GSM8KAccuracyReward
from twinkle_rewards.exact import MultiModalAccuracyReward as MultiModalAccuracyReward
from twinkle_rewards.formats import CoTReward as CoTReward
from twinkle_rewards.formats import FormatReward as FormatReward
from twinkle_rewards.formats import GSM8KFormatReward as GSM8KFormatReward
from twinkle_rewards.group import RewardGroup as RewardGroup
from twinkle_rewards.mathematics import MathReward as MathReward
from twinkle_rewards.olympiad import OlympiadBenchAccuracyReward as OlympiadBenchAccuracyReward
from twinkle_rewards.olympiad import OlympiadBenchFormatReward as OlympiadBenchFormatReward
from twinkle_rewards.olympiad import OlympiadBenchQualityReward as OlympiadBenchQualityReward
from twinkle_rewards.overlap import F1Reward as F1Reward
from twinkle_rewards.overlap import ToolExploreReward as ToolExploreReward

"""Published path of rewards for answers in words and for the use of tools; `twinkle-rewards` provides them."""

from typing import TYPE_CHECKING, Any

import twinkle.reward

if TYPE_CHECKING:
    from twinkle.reward import CoTReward as CoTReward
    from twinkle.reward import F1Reward as F1Reward
    from twinkle.reward import ToolExploreReward as ToolExploreReward

__all__ = ["CoTReward", "F1Reward", "ToolExploreReward"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(twinkle.reward, name)


def __dir__() -> list[str]:
    return list(__all__)

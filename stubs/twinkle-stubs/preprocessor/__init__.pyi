# Written by `twinkle plugins types`; do not edit.
"""Preprocessors: the base class `Preprocessor`, `DataFilter`, and every installed preprocessor by name."""

from twinkle._registry import lazy_names
from twinkle.filter import DataFilter, Filter
from twinkle.preprocessor.base import Preprocessor

__all__ = ["DataFilter", "Filter", "Preprocessor"]


from twinkle.preprocessor.base import Preprocessor as Preprocessor
from twinkle_data.alpaca import AlpacaProcessor as AlpacaProcessor
from twinkle_data.math_problems import CompetitionMathGRPOProcessor as CompetitionMathGRPOProcessor
from twinkle_data.math_problems import CompetitionMathProcessor as CompetitionMathProcessor
from twinkle_data.math_problems import CountdownProcessor as CountdownProcessor
from twinkle_data.math_problems import GSM8KProcessor as GSM8KProcessor
from twinkle_data.math_problems import QuestionProcessor as QuestionProcessor
from twinkle_data.preferences import EmojiDPOProcessor as EmojiDPOProcessor
from twinkle_data.preferences import PreferenceProcessor as PreferenceProcessor
from twinkle_data.self_cognition import SelfCognitionProcessor as SelfCognitionProcessor
from twinkle_data.sharegpt import ShareGPTProcessor as ShareGPTProcessor
from twinkle_data.vision import CLEVRProcessor as CLEVRProcessor
from twinkle_data.vision import OlympiadBenchProcessor as OlympiadBenchProcessor

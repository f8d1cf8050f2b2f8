"""Quality of conversations: filters of rows, and the pipeline that applies them in a data set."""

from twinkle_agentic.preprocessor.backends import LLMBackend, OpenAIBackend, SamplerBackend
from twinkle_agentic.preprocessor.base import QualityPreprocessor, RowFilter
from twinkle_agentic.preprocessor.messages import HardFilter, MessageNormalizer, MessageSanityFilter, RefuseFilter
from twinkle_agentic.preprocessor.texts import (
    DeadLoopFilter,
    DedupFilter,
    FixUnicodeFilter,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenNumFilter,
)

__all__ = [
    "DeadLoopFilter",
    "DedupFilter",
    "FixUnicodeFilter",
    "HardFilter",
    "LLMBackend",
    "MessageNormalizer",
    "MessageSanityFilter",
    "OpenAIBackend",
    "QualityPreprocessor",
    "RefuseFilter",
    "RemoveRepeatSentencesFilter",
    "RowFilter",
    "SamplerBackend",
    "SpecialCharsFilter",
    "TokenNumFilter",
]

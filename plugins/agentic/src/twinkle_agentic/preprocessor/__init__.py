"""Quality of conversations: filters of rows, and the pipeline that applies them in a data set."""

from twinkle_agentic.preprocessor.backends import LLMBackend, OpenAIBackend, SamplerBackend
from twinkle_agentic.preprocessor.base import QualityPreprocessor, RowFilter
from twinkle_agentic.preprocessor.judged import (
    IntentClassifier,
    IntentDetector,
    KeywordIntentDetector,
    ModelFilter,
    ModelIntentDetector,
)
from twinkle_agentic.preprocessor.messages import HardFilter, MessageNormalizer, MessageSanityFilter, RefuseFilter
from twinkle_agentic.preprocessor.personal import PIIPresidioFilter
from twinkle_agentic.preprocessor.scores import (
    ChrMinScorer,
    ParaphraseScorer,
    PassNScorer,
    ScoreFilter,
    Scorer,
    SIFDScorer,
)
from twinkle_agentic.preprocessor.texts import (
    DeadLoopFilter,
    DedupFilter,
    FixUnicodeFilter,
    RemoveRepeatSentencesFilter,
    SpecialCharsFilter,
    TokenNumFilter,
    TokenSoupFilter,
)

__all__ = [
    "ChrMinScorer",
    "DeadLoopFilter",
    "DedupFilter",
    "FixUnicodeFilter",
    "HardFilter",
    "IntentClassifier",
    "IntentDetector",
    "KeywordIntentDetector",
    "LLMBackend",
    "MessageNormalizer",
    "MessageSanityFilter",
    "ModelFilter",
    "ModelIntentDetector",
    "OpenAIBackend",
    "PIIPresidioFilter",
    "ParaphraseScorer",
    "PassNScorer",
    "QualityPreprocessor",
    "RefuseFilter",
    "RemoveRepeatSentencesFilter",
    "RowFilter",
    "SIFDScorer",
    "SamplerBackend",
    "ScoreFilter",
    "Scorer",
    "SpecialCharsFilter",
    "TokenNumFilter",
    "TokenSoupFilter",
]

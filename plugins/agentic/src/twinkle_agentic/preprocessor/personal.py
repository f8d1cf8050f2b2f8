"""`PIIPresidioFilter`: personal data in conversations is masked, or drops the row."""

from collections.abc import Sequence
from typing import Any, Literal

from twinkle import requires
from twinkle.errors import ArgumentError
from twinkle_agentic.preprocessor.base import Row, RowFilter, text_of, with_texts


class PIIPresidioFilter(RowFilter):
    """Masks personal data that Presidio finds, such as addresses, numbers of cards and of phones, or drops the row.

    Without `analyzer`, Presidio's recognizers of patterns are used, which need no model. For names and places, pass an
    `AnalyzerEngine` that has a language model.

    Args:
        action: `"mask"` replaces each finding by its kind, such as `<EMAIL_ADDRESS>`; `"drop"` drops the row.
        entities: the kinds that count, by Presidio's names; None are all that the analyzer knows.
        language: of the texts.
        score_threshold: findings that are less certain, 0 to 1, do not count.
        analyzer: an `AnalyzerEngine`, or any object with its method `analyze(text, language, entities=,
            score_threshold=)`.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        action: Literal["mask", "drop"] = "mask",
        entities: Sequence[str] | None = None,
        language: str = "en",
        score_threshold: float = 0.5,
        analyzer: Any = None,
    ) -> None:
        if action not in ("mask", "drop"):
            raise ArgumentError(f"PIIPresidioFilter: action must be 'mask' or 'drop', got {action!r}")
        if not 0 <= score_threshold <= 1:
            raise ArgumentError(f"PIIPresidioFilter: score_threshold must be between 0 and 1, got {score_threshold!r}")
        if isinstance(entities, str):
            raise ArgumentError(f"PIIPresidioFilter: entities must be a list, got {entities!r}")
        self.action, self.language, self.score_threshold = action, language, score_threshold
        self.entities = None if entities is None else list(entities)
        self.analyzer = analyzer
        self._loaded: Any = analyzer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": self.analyzer}

    def judge(self, row: Row) -> Row | str:
        """Return the row without personal data, or that it has some.

        Raises:
            RequirementMissing: presidio-analyzer is not installed.
        """
        if self.action == "mask":
            return with_texts(row, self._masked)
        texts = [text for m in row["messages"] for text in (text_of(m), str(m.get("reasoning_content") or ""))]
        return "personal data" if any(self._findings(text) for text in texts if text) else row

    def _masked(self, text: str) -> str:
        spans: list[tuple[int, int, str]] = []
        for found in sorted(self._findings(text), key=lambda found: (found.start, -found.end)):
            if spans and found.start < spans[-1][1]:  # they overlap: what either covers is masked, under the first kind
                start, end, kind = spans[-1]
                spans[-1] = start, max(end, found.end), kind
            else:
                spans.append((found.start, found.end, found.entity_type))
        for start, end, kind in reversed(spans):
            text = f"{text[:start]}<{kind}>{text[end:]}"
        return text

    def _findings(self, text: str) -> list[Any]:
        if self._loaded is None:
            self._loaded = _patterns(self.language)
        return list(
            self._loaded.analyze(
                text, self.language, entities=self.entities, score_threshold=self.score_threshold or None
            )
        )


def _patterns(language: str) -> Any:
    """Return Presidio's analyzer with an empty language model."""
    requires("presidio-analyzer>=2.2")
    import spacy
    from presidio_analyzer import AnalyzerEngine
    from presidio_analyzer.nlp_engine import SpacyNlpEngine

    engine = SpacyNlpEngine(models=[{"lang_code": language, "model_name": ""}])
    engine.nlp = {language: spacy.blank(language)}
    return AnalyzerEngine(nlp_engine=engine, supported_languages=[language])

"""Filters that ask a model or a detector: whether a conversation is good, and what its user wants."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from twinkle.errors import ArgumentError
from twinkle_agentic.preprocessor.backends import LLMBackend
from twinkle_agentic.preprocessor.base import Row, RowFilter, of_role, text_of

_VERDICT = re.compile(r"[\W_]*(yes|no)\b", re.IGNORECASE)
QUESTION = "Is every answer of the assistant in this conversation correct, complete and helpful?"


class ModelFilter(RowFilter):
    """Drops conversations about which a model answers a question with "no".

    Args:
        backend: the model.
        question: a question about the conversation that "yes" or "no" answers; "yes" keeps the row.
        max_tokens: of the model's answer, with its reasoning.

    Raises:
        ArgumentError: the question is empty.
    """

    def __init__(self, backend: LLMBackend, question: str = QUESTION, max_tokens: int = 512) -> None:
        if not question.strip():
            raise ArgumentError("ModelFilter: question must not be empty")
        self.backend, self.question, self.max_tokens = backend, question, max_tokens

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that the model rejects it or does not decide.

        Raises:
            TwinkleError: the model does not answer.
        """
        prompt = f"{transcript(row['messages'])}\n\n{self.question} Answer with one word, yes or no."
        [answer] = self.backend.chat([{"role": "user", "content": prompt}], max_tokens=self.max_tokens)
        verdict = _VERDICT.match(answer["content"])
        if verdict is None:
            return "no verdict"
        return row if verdict[1].lower() == "yes" else "rejected by the model"


class IntentDetector(ABC):
    """Names what a text asks for."""

    @abstractmethod
    def __call__(self, text: str) -> str | None:
        """Return the intent of a text; None if it has none that this detector knows."""


class KeywordIntentDetector(IntentDetector):
    """Finds intents by words; of several, the one with the most occurrences, then the first.

    Args:
        keywords: for each intent, words or phrases; upper and lower case are the same.

    Raises:
        ArgumentError: an intent has no words.
    """

    def __init__(self, keywords: Mapping[str, Sequence[str]]) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        for intent, words in keywords.items():
            if isinstance(words, str) or not words or not all(words):
                raise ArgumentError(f"KeywordIntentDetector: {intent!r} must have a list of words, got {words!r}")
            self._patterns[intent] = re.compile("|".join(map(_pattern, words)), re.IGNORECASE)

    def __call__(self, text: str) -> str | None:
        """Return the intent whose words occur most often."""
        counts = {intent: len(pattern.findall(text)) for intent, pattern in self._patterns.items()}
        found = max(counts, key=lambda intent: counts[intent], default=None)
        return found if found is not None and counts[found] else None


class ModelIntentDetector(IntentDetector):
    """Lets a model choose one of several intents.

    Args:
        backend: the model.
        intents: for each intent, a description of one line.
        max_tokens: of the model's answer, with its reasoning.

    Raises:
        ArgumentError: there are no intents.
    """

    def __init__(self, backend: LLMBackend, intents: Mapping[str, str], max_tokens: int = 512) -> None:
        if not intents:
            raise ArgumentError("ModelIntentDetector: intents must not be empty")
        self.backend, self.intents, self.max_tokens = backend, dict(intents), max_tokens

    def __call__(self, text: str) -> str | None:
        """Return the first intent that the model's answer names.

        Raises:
            TwinkleError: the model does not answer.
        """
        listed = "\n".join(f"- {name}: {meaning}" for name, meaning in self.intents.items())
        prompt = f"Intents:\n{listed}\n\nMessage:\n{text}\n\nAnswer with the name of the intent of this message alone."
        [answer] = self.backend.chat([{"role": "user", "content": prompt}], max_tokens=self.max_tokens)
        found = ((re.search(_pattern(name), answer["content"], re.IGNORECASE), name) for name in self.intents)
        places = [(match.start(), -len(name), name) for match, name in found if match]
        return min(places)[2] if places else None


class IntentClassifier(RowFilter):
    """Writes the intent of the first question into each row, and drops rows of other intents than the wanted ones.

    Args:
        detectors: one, or several in order: the first that knows an intent decides.
        keep: intents of rows that are kept; None keeps all.
        key: the column of the intent.
        default: the intent of rows that no detector knows.

    Raises:
        ArgumentError: there is no detector.
    """

    def __init__(
        self,
        detectors: IntentDetector | Sequence[IntentDetector],
        keep: Sequence[str] | None = None,
        key: str = "intent",
        default: str = "other",
    ) -> None:
        self.detectors = [detectors] if callable(detectors) else list(detectors)
        if not self.detectors:
            raise ArgumentError("IntentClassifier: detectors must not be empty")
        if isinstance(keep, str):
            raise ArgumentError(f"IntentClassifier: keep must be a list of intents, got {keep!r}")
        self.keep, self.key, self.default = None if keep is None else set(keep), key, default

    def judge(self, row: Row) -> Row | str:
        """Return the row with its intent, or that it has another intent."""
        text = "".join(map(text_of, of_role(row, "user")[:1]))
        known = (intent for detector in self.detectors if (intent := detector(text)) is not None)
        intent = next(known, self.default)
        if self.keep is not None and intent not in self.keep:
            return f"intent {intent}"
        return {**row, self.key: intent}


def transcript(messages: Sequence[Mapping[str, object]]) -> str:
    """Return a conversation as text, each message under its role."""
    return "\n\n".join(f"[{message.get('role')}]\n{text_of(message)}" for message in messages)


def _pattern(words: str) -> str:
    """Return a pattern of whole words; scripts without spaces have no word ends."""
    start, end = (r"\b" if words[at].isascii() and words[at].isalnum() else "" for at in (0, -1))
    return f"{start}{re.escape(words)}{end}"

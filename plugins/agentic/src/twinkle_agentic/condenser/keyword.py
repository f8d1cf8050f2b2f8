"""`KeywordCondenser`: the beginning of a text, who does what in it, and its most frequent names and words."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_agentic.condenser.base import SKIPPED_ROLES, Choice, Condenser, at_least, condensed
from twinkle_agentic.data_format import Chunks

_SENTENCE = re.compile(r"[^.!?。！？\n]+(?:[.!?。！？]+(?=\s|$|[^\x00-\x7f])|$|\n)|[^\n]+")
_VERB = re.compile(
    r"\s((?:is|are|was|were|has|have|had|will|can|became|becomes|made|makes|won|wrote|built|led|gave|took)"
    r"(?:\s(?:been\s)?\w+(?:ed|en)(?:\s(?:by|in|at|on|to|for))?)?|\w{3,}ed(?:\s(?:by|in|at|on|to|for))?)\s"
)
_PRONOUN = re.compile(r"(?:it|he|she|they|we|i|you|this|that|these|those|there|which|who)\b", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:the|an?)\s+", re.IGNORECASE)
_NAME = re.compile(r"[A-Z][\w'’-]*(?:\s(?:of\s|the\s|de\s|van\s)?[A-Z][\w'’-]*)*")
_WORD = re.compile(r"\w[\w'’-]{2,}")
_STOP_WORDS = (
    "about above after again all also and any are because been before being below between both but can could did does "
    "down during each few for from further had has have her here him his how into its itself just more most must not "
    "now off once one only other our out over own same she should some such than that the their them then there these "
    "they this those through too two under until very was were what when where which while who whom why will with "
    "would you your"
)
_STOP = frozenset(_STOP_WORDS.split())


class KeywordCondenser(Condenser):
    """Shortens a chunk to lines `Open:`, `Rel:` and `More:`, without a model.

    `Open:` has the first sentence; `Rel:` has relations `(subject | verb | object)` from sentences whose subject is not
    a pronoun; `More:` has the most frequent names and words that are not in the first sentence. Parts are added while
    the result has at most length / `compression_ratio` characters. English rules find the verbs.

    Args:
        num_relations: relations of a chunk, at most.
        max_first_sentence_chars: characters of the first sentence, at most; 0 leaves it out.
        num_keywords: names and words of a chunk, at most.
        compression_ratio: by how much a chunk is shortened, above 1.
        spacy_model: None; models of spaCy are not supported.
        min_chars: shorter chunks stay.
        skip_roles: chunks of these roles stay.
        rounds: only chunks of these rounds are shortened; None are all.

    Raises:
        ArgumentError: an argument is outside its range.
    """

    def __init__(
        self,
        num_relations: int = 3,
        max_first_sentence_chars: int = 160,
        num_keywords: int = 8,
        compression_ratio: float = 4.0,
        spacy_model: str | None = None,
        min_chars: int = 200,
        skip_roles: Collection[str] = SKIPPED_ROLES,
        rounds: Sequence[int] | None = None,
    ) -> None:
        if spacy_model is not None:
            raise ArgumentError(
                f"spacy_model={spacy_model!r}: this condenser has its own rules and reads no model of spaCy; leave it "
                "out"
            )
        self.num_relations = at_least("num_relations", num_relations, 0)
        self.max_first_sentence_chars = at_least("max_first_sentence_chars", max_first_sentence_chars, 0)
        self.num_keywords = at_least("num_keywords", num_keywords, 0)
        self.choice = Choice(compression_ratio, min_chars, skip_roles, rounds)

    def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
        """Return the chunks, those that were chosen shortened.

        Args:
            chunks: of one or several conversations.
            **kwargs: none; an unknown name is an error.
        """
        if kwargs:
            raise ArgumentError(f"KeywordCondenser takes no argument {next(iter(kwargs))!r} in a call")
        return Chunks(
            [
                condensed(chunk, self.condense(chunk["content"], self.choice.budget(chunk["content"])))
                if self.choice.takes(chunk)
                else chunk
                for chunk in chunks.chunks
            ]
        )

    def condense(self, text: str, budget: int) -> str:
        """Return a text of at most `budget` characters; without sentences, its beginning."""
        sentences = [found[0].strip() for found in _SENTENCE.finditer(text) if found[0].strip()]
        opening = shortened(sentences[0], self.max_first_sentence_chars) if sentences else ""
        lines: list[tuple[str, str, list[str]]] = [
            ("Open: ", "", [shortened(opening, budget - len("Open: "))] if opening else []),
            ("Rel: ", "; ", [*relations(sentences)][: self.num_relations]),
            ("More: ", ", ", keywords(text, opening, self.num_keywords)),
        ]
        found = ""
        for title, between, items in lines:
            line = ""
            for item in items:
                longer = line + (between if line else title) + item
                if item and len(found) + bool(found) + len(longer) <= budget:
                    line = longer
            found += ("\n" if found and line else "") + line
        return found or shortened(text.strip(), budget) or text[:budget]


def relations(sentences: Iterable[str]) -> list[str]:
    """Return `(subject | verb | object)` of each sentence that has these, without repetitions."""
    found: dict[str, str] = {}
    for sentence in sentences:
        subject, _, rest = sentence.partition(", ")[0].partition(" (")
        verb = _VERB.search(f" {sentence} ") if subject or rest else None
        if verb is None:
            continue
        before = _ARTICLE.sub("", sentence[: max(0, verb.start() - 1)].strip(" ,;:"))
        after = _ARTICLE.sub("", re.split(r"[,;:.!?()]", sentence[verb.end() - 2 :].strip(), maxsplit=1)[0].strip())
        if before and after and len(before) <= 60 and not _PRONOUN.match(before):
            relation = f"({before} | {verb[1]} | {after})"
            found.setdefault(relation.lower(), relation)
    return list(found.values())


def keywords(text: str, known: str, count: int) -> list[str]:
    """Return the most frequent names and words of a text that are not in `known`; names count ten times."""
    seen = {word.lower() for word in _WORD.findall(known)}
    weights: Counter[str] = Counter()
    for name in (_ARTICLE.sub("", found) for found in _NAME.findall(text)):
        words = [word.lower() for word in _WORD.findall(name)]
        if words and not all(word in seen or word in _STOP for word in words):
            weights[name] += 10
    for word in _WORD.findall(text):
        if word.islower() and word not in seen and word not in _STOP:
            weights[word] += 1
    chosen: list[str] = []
    for name, _ in weights.most_common():
        if len(chosen) == count:
            break
        if not any(name.lower() in other.lower() for other in chosen):
            chosen.append(name)
    return chosen


def shortened(text: str, limit: int) -> str:
    """Return the beginning of a text, cut between words where that leaves half of it."""
    if len(text) <= limit:
        return text
    cut = text[: max(0, limit)]
    space = cut.rfind(" ")
    return cut[:space].rstrip() if space >= limit // 2 > 0 else cut.rstrip()

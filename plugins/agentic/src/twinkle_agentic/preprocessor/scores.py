"""`ScoreFilter`: numbers for conversations, which a model computes or helps to compute, and limits for them."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.data_format import Trajectory
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle_agentic.preprocessor.backends import LLMBackend
from twinkle_agentic.preprocessor.base import Row, RowFilter, of_role, text_of

Messages = Sequence[Mapping[str, Any]]


class Scorer(ABC):
    """Computes a number for a conversation.

    Args:
        min_score: rows below it are dropped; None keeps them.
        max_score: rows above it are dropped; None keeps them.

    Attributes:
        name: under which the number is stored.

    Raises:
        ArgumentError: `min_score` is above `max_score`.
    """

    name: str

    def __init__(self, min_score: float | None = None, max_score: float | None = None) -> None:
        if min_score is not None and max_score is not None and min_score > max_score:
            raise ArgumentError(f"{type(self).__name__}: min_score {min_score} is above max_score {max_score}")
        self.min_score, self.max_score = min_score, max_score

    @abstractmethod
    def score(self, row: Row, template: Any, backend: LLMBackend) -> float | None:
        """Return the number of a row; None if the row has none, for instance no answer."""

    def accepts(self, score: float | None) -> bool:
        """Return whether a number is within the limits; without limits, every row is."""
        if self.min_score is None and self.max_score is None:
            return True
        if score is None or not math.isfinite(score):
            return False
        low = -math.inf if self.min_score is None else self.min_score
        return low <= score <= (math.inf if self.max_score is None else self.max_score)


class ScoreFilter(RowFilter):
    """Writes the numbers of scorers into each row, and drops rows outside of their limits.

    Args:
        template: encodes conversations as the model of `backend` reads them; only `SIFDScorer` needs it.
        backend: the model.
        scorers: in order; the ones after a number outside its limits are not computed.
        key: the column of the numbers, a dict by the names of the scorers.

    Raises:
        ArgumentError: there is no scorer, or two have one name.
    """

    def __init__(self, template: Any, backend: LLMBackend, scorers: Sequence[Scorer], key: str = "scores") -> None:
        self.template, self.backend, self.scorers, self.key = template, backend, list(scorers), key
        names = [scorer.name for scorer in self.scorers]
        if not names or len(set(names)) < len(names):
            raise ArgumentError(f"ScoreFilter: scorers must have different names, got {names}")

    def judge(self, row: Row) -> Row | str:
        """Return the row with its numbers, or which one is outside its limits.

        Raises:
            TwinkleError: the model does not answer.
        """
        scores: dict[str, float | None] = {}
        for scorer in self.scorers:
            score = scores[scorer.name] = scorer.score(row, self.template, self.backend)
            if not scorer.accepts(score):
                return f"{scorer.name} {'is missing' if score is None else f'{score:.4g}'}"
        return {**row, self.key: scores}


class SIFDScorer(Scorer):
    """How hard it is to follow the instruction (IFD, arXiv:2308.12032, eq. 4; by a small model, arXiv:2402.00530).

    It is the perplexity of the answer after the question, divided by that of the answer alone: near 0, the question
    determines the answer; above 1, it does not help. All trained tokens count.
    """

    name = "ifd"

    def score(self, row: Row, template: Any, backend: LLMBackend) -> float | None:
        """Return the ratio; None without an answer.

        Raises:
            Unsupported: the backend has no log-probabilities of prompts.
        """
        answers = of_role(row, "assistant")
        if not any(map(text_of, answers)):
            return None
        alone = [{"role": "user", "content": ""}, answers[-1]]
        return math.exp(_loss(row["messages"], template, backend) - _loss(alone, template, backend))


class PassNScorer(Scorer):
    """The share of sampled answers that a reward accepts.

    Args:
        reward: takes trajectories, returns a number for each; above `threshold`, an answer is right. The trajectories
            have the other columns of the row, such as `user_data`.
        n: how many answers are sampled.
        temperature: of sampling.
        max_tokens: of an answer.
        threshold: a reward above it counts.
        min_score: see `Scorer`.
        max_score: see `Scorer`.
    """

    name = "pass_n"

    def __init__(
        self, reward: Callable[[list[Trajectory]], Sequence[float]], n: int = 4, *, temperature: float = 1.0,
        max_tokens: int = 1024, threshold: float = 0.5, min_score: float | None = None, max_score: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(min_score, max_score)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ArgumentError(f"PassNScorer: n must be at least 1, got {n!r}")
        self.reward, self.n, self.threshold = reward, n, threshold
        self.temperature, self.max_tokens = temperature, max_tokens

    def score(self, row: Row, template: Any, backend: LLMBackend) -> float | None:
        """Return the share; None without a question.

        Raises:
            DataError: the reward returns another number of values.
        """
        question = asked(row)
        if not question:
            return None
        answers = backend.chat(question, temperature=self.temperature, max_tokens=self.max_tokens, n=self.n)
        rows: Any = [{**row, "messages": [*question, {"role": "assistant", **answer}]} for answer in answers]
        rewards = list(self.reward(rows))
        if len(rewards) != len(rows):
            raise DataError(f"PassNScorer: the reward returned {len(rewards)} values for {len(rows)} answers")
        return sum(reward > self.threshold for reward in rewards) / len(rewards)


class ChrMinScorer(Scorer):
    """How far the row's answer is from what the model says: the smallest chrF over sampled answers.

    chrF is the F-score of character n-grams, n from 1 to 6, with twice the weight on recall (Popović, *chrF: character
    n-gram F-score for automatic MT evaluation*, WMT 2015); 1 for equal texts.

    Args:
        n: how many answers are sampled.
        temperature: of sampling.
        max_tokens: of an answer.
        min_score: see `Scorer`.
        max_score: see `Scorer`.
    """

    name = "chr_min"

    def __init__(
        self, n: int = 1, *, temperature: float = 0.0, max_tokens: int = 1024, min_score: float | None = None,
        max_score: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(min_score, max_score)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ArgumentError(f"ChrMinScorer: n must be at least 1, got {n!r}")
        self.n, self.temperature, self.max_tokens = n, temperature, max_tokens

    def score(self, row: Row, template: Any, backend: LLMBackend) -> float | None:
        """Return the smallest chrF; None without a question and an answer."""
        question, answers = asked(row), of_role(row, "assistant")
        if not question or not answers:
            return None
        said = backend.chat(question, temperature=self.temperature, max_tokens=self.max_tokens, n=self.n)
        return min(chrf(answer["content"], text_of(answers[-1])) for answer in said)


class ParaphraseScorer(Scorer):
    """How stable the model's answer is: the chrF of its answers to the question, and to the question in other words.

    Args:
        max_tokens: of an answer.
        min_score: see `Scorer`.
        max_score: see `Scorer`.
    """

    name = "paraphrase"

    def __init__(
        self, *, max_tokens: int = 1024, min_score: float | None = None, max_score: float | None = None
    ) -> None:
        super().__init__(min_score, max_score)
        self.max_tokens = max_tokens

    def score(self, row: Row, template: Any, backend: LLMBackend) -> float | None:
        """Return the chrF; None without a question."""
        question = asked(row)
        if not question:
            return None
        request = f"Say this in other words, and nothing else:\n\n{text_of(question[-1])}"
        [other] = backend.chat([{"role": "user", "content": request}], max_tokens=self.max_tokens)
        said = [
            backend.chat(messages, max_tokens=self.max_tokens)[0]["content"]
            for messages in (question, [*question[:-1], {**question[-1], "content": other["content"]}])
        ]
        return chrf(said[1], said[0])


def asked(row: Row) -> list[Mapping[str, Any]]:
    """Return the messages up to the last one of the user; empty without one."""
    messages = list(row["messages"])
    while messages and messages[-1].get("role") != "user":
        messages.pop()
    return messages


def chrf(hypothesis: str, reference: str, order: int = 6, beta: float = 2.0) -> float:
    """Return the F-score of character n-grams, without white space, 0 to 1."""
    texts = ["".join(text.split()) for text in (hypothesis, reference)]
    if texts[0] == texts[1]:
        return 1.0
    shares: list[tuple[float, float]] = []
    for n in range(1, order + 1):
        ours, theirs = (Counter(text[at : at + n] for at in range(len(text) - n + 1)) for text in texts)
        if ours and theirs:
            common = (ours & theirs).total()
            shares.append((common / ours.total(), common / theirs.total()))
    if not shares:
        return 0.0
    precision, recall = (sum(values) / len(shares) for values in zip(*shares, strict=True))
    weighted = beta**2 * precision + recall
    return (1 + beta**2) * precision * recall / weighted if weighted else 0.0


def _loss(messages: Messages, template: Any, backend: LLMBackend) -> float:
    """Return the mean negative log-probability of the trained tokens of a conversation."""
    feature = template.encode({"messages": list(messages)})
    found = backend.prompt_logprobs(messages)
    if found is None:
        raise Unsupported(f"{type(backend).__name__} has no log-probabilities of prompts; use SamplerBackend")
    # The label of a position is the next token, whose log-probability is that of the next position.
    places = [at + 1 for at, label in enumerate(feature["labels"]) if label != -100]
    values = [found[at] for at in places if at < len(found) and found[at] is not None]
    if not values or len(values) < len(places):
        raise DataError("ScoreFilter: the template and the backend encode a conversation differently")
    return -math.fsum(values) / len(values)

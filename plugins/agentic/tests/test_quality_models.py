"""Filters that ask models: verdicts, intents, scores against numbers of another computation, and personal data."""

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, DataError, RequirementMissing, Unsupported
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle.testing import tiny_model
from twinkle_agentic.preprocessor import (
    ChrMinScorer,
    IntentClassifier,
    KeywordIntentDetector,
    LLMBackend,
    ModelFilter,
    ModelIntentDetector,
    ParaphraseScorer,
    PassNScorer,
    PIIPresidioFilter,
    SamplerBackend,
    ScoreFilter,
    Scorer,
    SIFDScorer,
    TokenSoupFilter,
)
from twinkle_agentic.preprocessor.scores import chrf

QUESTION = "How does a heat pump work in winter?"
ANSWER = "It moves heat from the cold air outside into the house."


def talk(question: str, *answers: str, **keys: Any) -> dict[str, Any]:
    said = [{"role": "assistant", "content": text} for text in answers]
    return {"messages": [{"role": "user", "content": question}, *said], **keys}


class Says(LLMBackend):
    """Answers with the given texts, and remembers what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), []

    def chat(self, messages: Any, *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1) -> Any:
        self.asked.append((list(messages), temperature))
        found, self.texts = self.texts[:n], self.texts[n:]
        return [{"content": text, "reasoning_content": ""} for text in found]


@pytest.mark.parametrize(
    ("said", "reason"),
    [("Yes.", None), ("**no**, the unit is wrong", "rejected by the model"), ("Nothing", "no verdict")],
)
def test_a_model_decides_which_rows_stay(said: str, reason: str | None) -> None:
    backend = Says(said)
    row = talk(QUESTION, ANSWER)
    kept, dropped = ModelFilter(backend, "Is it polite?")([row])
    assert (kept, dropped) == (([row], []) if reason is None else ([], [{**row, "drop_reason": reason}]))
    [([message], temperature)] = backend.asked
    assert temperature == 0
    assert all(part in message["content"] for part in (QUESTION, ANSWER, "Is it polite?"))


def test_intents_are_found_by_words_and_by_a_model_and_chosen() -> None:
    words = KeywordIntentDetector({"code": ["python", "c++"], "sums": ["add", "加法"]})
    backend = Says("I think it is: chitchat", "none of these")
    model = ModelIntentDetector(backend, {"chat": "small talk", "chitchat": "talk about nothing"})
    rows = [talk(text) for text in ("Python, c++ or add?", "做加法", "address a friend", "?")]
    kept, dropped = IntentClassifier([words, model], keep=["code", "sums", "chitchat"])(rows)
    assert [row["intent"] for row in kept] == ["code", "sums", "chitchat"]
    assert [row["drop_reason"] for row in dropped] == ["intent other"]
    assert "small talk" in backend.asked[0][0][0]["content"]


def test_soup_is_dropped_and_languages_are_not() -> None:
    soup = [
        "the кaтze שלsomeוםing over",
        "ok \ufffd\ufffd\ufffd",
    ]
    for text in soup:
        assert TokenSoupFilter()([talk(QUESTION, text)])[1][0]["drop_reason"] == "token soup", text
    for text in (
        "使用Python编程，Δx = 3 μm and naïve Œuvre.", "Он сказал: hello, мир.", "日本語のカタカナとEnglishが混ざる",
        "عربي and עברית", "x² + αβ = ½", ANSWER,
    ):  # fmt: skip
        assert TokenSoupFilter()([talk(QUESTION, text)])[1] == [], text


class Length(Scorer):
    name = "length"

    def score(self, row: Any, template: Any, backend: Any) -> float | None:
        return float(len(row["messages"])) if len(row["messages"]) > 1 else None


def test_scores_are_written_and_limits_drop() -> None:
    rows = [talk(QUESTION), talk(QUESTION, ANSWER), talk(QUESTION, ANSWER, ANSWER)]
    kept, dropped = ScoreFilter(None, Says(), [Length(max_score=2)])(rows)
    assert kept == [{**rows[1], "scores": {"length": 2.0}}]
    assert [row["drop_reason"] for row in dropped] == ["length is missing", "length 3"]
    assert ScoreFilter(None, Says(), [Length()])(rows)[1] == []


def test_the_difficulty_of_an_instruction_is_the_ratio_of_perplexities(tmp_path: Any) -> None:
    folder = tiny_model(tmp_path / "model", "llama", initializer_range=0.3)
    template = Template(str(folder))
    sampler = TorchSampler(str(folder))
    sampler.set_template(Template, model_id=str(folder))
    row = talk("hello", "a house")

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def loss(messages: Any) -> float:
        """As transformers computes it, of the tokens after the opening of the assistant's turn."""
        tokens = template.tokenizer.apply_chat_template(messages, return_dict=False)
        opening = template.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        feature = template.encode({"messages": messages})
        assert feature["input_ids"] == tokens
        trained = [at + 1 for at, label in enumerate(feature["labels"]) if label != -100]
        assert trained[0] == len(opening)
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return -sum(scores[at - 1, tokens[at]].item() for at in trained) / len(trained)

    expected = math.exp(loss(row["messages"]) - loss([{"role": "user", "content": ""}, row["messages"][1]]))
    [[found], []] = ScoreFilter(template, SamplerBackend(sampler), [SIFDScorer()])([row])
    assert found["scores"]["ifd"] == pytest.approx(expected, rel=1e-4)
    assert SIFDScorer().score(talk(QUESTION), template, Says()) is None
    with pytest.raises(Unsupported, match="Says has no log-probabilities of prompts"):
        SIFDScorer().score(row, template, Says())


def test_the_share_of_right_answers() -> None:
    backend = Says("42", "41", "42", "0")

    def reward(rows: Any) -> list[float]:
        assert all(row["messages"][0]["content"] == "6 * 7?" for row in rows)
        return [float(row["messages"][-1]["content"] == row["truth"]) for row in rows]

    row = talk("6 * 7?", "It is 43.", truth="42")
    [[], [dropped]] = ScoreFilter(None, backend, [PassNScorer(reward, 4, max_score=0.4)])([row])
    assert dropped["drop_reason"] == "pass_n 0.5"
    assert backend.asked == [(row["messages"][:1], 1.0)]
    with pytest.raises(DataError, match="0 values for 1 answers"):
        PassNScorer(lambda rows: [], 1).score(row, None, Says("42"))


def test_texts_are_compared_by_n_grams_of_characters() -> None:
    # "ab" against "ac": unigrams share 1 of 2, bigrams 0 of 1; longer ones do not exist.
    assert chrf("ab", "ac") == pytest.approx(0.25)
    # Precision 1 and 1, recall 2/3 and 1/2: (1 + 4) p r / (4 p + r).
    assert chrf("ab", "abc") == pytest.approx(5 * 1 * (7 / 12) / (4 + 7 / 12))
    assert chrf("a b", "ab") == 1
    assert chrf("", "a") == 0


def test_answers_are_compared_with_the_rows_and_with_those_to_other_words() -> None:
    row = talk(QUESTION, "ac", "never read")
    row["messages"].pop()
    filtered = ScoreFilter(None, Says("ac", "ab"), [ChrMinScorer(2, temperature=1.0)])
    assert filtered([row])[0][0]["scores"] == {"chr_min": pytest.approx(0.25)}
    backend = Says("In winter, what does a heat pump do?", "ac", "ab")
    assert ParaphraseScorer().score(row, None, backend) == pytest.approx(0.25)
    assert backend.asked[2][0][-1]["content"] == "In winter, what does a heat pump do?"


class Finds:
    """Finds texts, as Presidio's analyzer returns them."""

    def __init__(self, **kinds: str) -> None:
        self.kinds = kinds

    def analyze(self, text: str, language: str, entities: Any = None, score_threshold: Any = None) -> list[Any]:
        assert (language, score_threshold) == ("en", 0.5)
        return [
            SimpleNamespace(entity_type=kind, start=text.index(found), end=text.index(found) + len(found))
            for kind, found in self.kinds.items()
            if found in text and (entities is None or kind in entities)
        ]


def test_personal_data_is_masked_whole_or_drops_the_row() -> None:
    analyzer = Finds(URL="example.org", EMAIL="ada@example.org", NAME="Ada")
    row = talk("Write to ada@example.org, says Ada", "ok")
    [[masked], []] = PIIPresidioFilter(analyzer=analyzer)([row])
    assert masked == talk("Write to <EMAIL>, says <NAME>", "ok")
    assert PIIPresidioFilter("drop", ["URL"], analyzer=analyzer)([row])[1][0]["drop_reason"] == "personal data"
    assert PIIPresidioFilter("drop", ["CARD"], analyzer=analyzer)([row]) == ([row], [])


def test_without_presidio_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.Distribution.from_name", _none)
    judge = pickle.loads(pickle.dumps(PIIPresidioFilter()))
    with pytest.raises(RequirementMissing, match="presidio-analyzer"):
        judge([talk(QUESTION, ANSWER)])


def _none(name: str) -> Any:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelFilter(Says(), " "), "question must not be empty"),
        (lambda: KeywordIntentDetector({"a": "word"}), "'a' must have a list of words"),
        (lambda: ModelIntentDetector(Says(), {}), "intents must not be empty"),
        (lambda: IntentClassifier([]), "detectors must not be empty"),
        (lambda: TokenSoupFilter(2), "must be between 0 and 1"),
        (lambda: ScoreFilter(None, Says(), [Length(), Length()]), r"different names, got \['length', 'length'\]"),
        (lambda: Length(2, 1), "min_score 2 is above max_score 1"),
        (lambda: PassNScorer(len, 0), "n must be at least 1, got 0"),  # type: ignore[arg-type, return-value]
        (lambda: PIIPresidioFilter("hide"), "must be 'mask' or 'drop', got 'hide'"),  # type: ignore[arg-type]
        (lambda: PIIPresidioFilter(score_threshold=50), "between 0 and 1, got 50"),
    ],
)
def test_what_makes_no_filter_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build()

"""Filters of conversations: each keeps what it should, names why it drops, and works in a data set."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.testing import tiny_tokenizer
from twinkle_agentic.preprocessor import (
    DeadLoopFilter,
    DedupFilter,
    FixUnicodeFilter,
    HardFilter,
    LLMBackend,
    MessageNormalizer,
    MessageSanityFilter,
    QualityPreprocessor,
    RefuseFilter,
    RemoveRepeatSentencesFilter,
    SamplerBackend,
    SpecialCharsFilter,
    TokenNumFilter,
)

QUESTION = "How does a heat pump work in winter?"
ANSWER = "It moves heat from the cold air outside into the house: a compressor raises the temperature of a refrigerant."


def talk(*said: Any, **keys: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [
        text if isinstance(text, dict) else {"role": roles[place % 2], "content": text}
        for place, text in enumerate(said)
    ]
    return {"messages": messages, **keys}


ASKED = {"role": "user", "content": "?"}
SAID = {"role": "assistant", "content": "a"}


def call(id: str, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": {}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]}


GOOD = talk(QUESTION, ANSWER, id=1)
DROPPED: list[tuple[Any, dict[str, Any], str]] = [
    (HardFilter(), talk("Hello!", ANSWER), "trivial question"),
    (HardFilter(), talk("你好！", ANSWER), "trivial question"),
    (HardFilter(), talk(QUESTION, "Well."), "short answer without reasoning"),
    (HardFilter(), {"messages": [{"role": "assistant", "content": ANSWER}]}, "no user message"),
    (RefuseFilter(), talk(QUESTION, "I'm sorry, but I can't help with that."), "refusal"),
    (RefuseFilter(), talk(QUESTION, "As an AI language model, I have no house."), "refusal"),
    (RefuseFilter(), talk(QUESTION, "抱歉，我无法回答这个问题。"), "refusal"),
    (MessageSanityFilter(), talk(QUESTION), "no answer"),
    (MessageSanityFilter(), talk(QUESTION, ""), "empty message"),
    (MessageSanityFilter(), {"messages": [{"role": "robot", "content": "a"}, *GOOD["messages"]]}, "empty message"),
    (MessageSanityFilter(), talk(QUESTION, ASKED, SAID), "order of roles"),
    (MessageSanityFilter(), talk(QUESTION, {"role": "tool", "content": "1"}, SAID), "order of roles"),
    (
        MessageSanityFilter(),
        talk(QUESTION, call("a"), {"role": "tool", "content": "1", "tool_call_id": "b"}, SAID),
        "result without call",
    ),
    (MessageSanityFilter(extra_sensitive_words=["Heat PUMP"]), GOOD, "sensitive words"),
    (DeadLoopFilter(), talk(QUESTION, "I see. " + "Wait a moment. " * 4), "repeated sentence"),
    (DeadLoopFilter(), talk(QUESTION, *[call("a"), {"role": "tool", "content": "1"}] * 4), "repeated tool calls"),
    (SpecialCharsFilter(), talk(QUESTION, "|---|---|---|"), "special characters"),
    (TokenNumFilter(tiny_tokenizer(), 1, 3), GOOD, "number of tokens"),
]  # fmt: skip
FILTERS = [
    HardFilter(), RefuseFilter(), MessageNormalizer(), MessageSanityFilter(), DedupFilter(), DeadLoopFilter(),
    FixUnicodeFilter(), RemoveRepeatSentencesFilter(), SpecialCharsFilter(), TokenNumFilter(tiny_tokenizer()),
]  # fmt: skip


@pytest.mark.parametrize("judge", FILTERS, ids=lambda one: type(one).__name__)
def test_a_good_conversation_is_kept_as_it_is(judge: Any) -> None:
    judge = pickle.loads(pickle.dumps(judge))
    assert judge([GOOD]) == ([GOOD], [])
    with_calls = talk(QUESTION, call("a"), {"role": "tool", "content": "12", "tool_call_id": "a"}, ANSWER, id=2)
    with_calls["messages"][-1]["role"] = "assistant"
    assert judge({name: [value] for name, value in with_calls.items()}) == ([with_calls], [])
    with pytest.raises(DataError, match=r"row 0 has no list 'messages' \(it has: text\)"):
        judge([{"text": "a"}])


@pytest.mark.parametrize(("judge", "row", "reason"), DROPPED)
def test_a_bad_one_is_dropped_with_its_reason(judge: Any, row: dict[str, Any], reason: str) -> None:
    assert judge([row]) == ([], [{**row, "drop_reason": reason}])


def test_what_looks_bad_but_is_not_is_kept() -> None:
    thought = talk(QUESTION, {"role": "assistant", "content": "Well.", "reasoning_content": "hm"})
    for judge, row in (
        (HardFilter(), thought),
        (HardFilter(), talk("Hi", "Hi", QUESTION, ANSWER)),
        (HardFilter(allow_incomplete_role=True), {"messages": [{"role": "assistant", "content": ANSWER}]}),
        (RefuseFilter(), talk(QUESTION, "Sorry to hear that your house is cold. " + ANSWER)),
        (RefuseFilter(), talk(QUESTION, "I can't", "Why?", ANSWER)),
        (DeadLoopFilter(), talk(QUESTION, "No. No. No. No. No.")),
        (DeadLoopFilter(5), talk(QUESTION, "Wait a moment. " * 4)),
        (MessageSanityFilter(check_role_order=False), talk(QUESTION, ASKED, SAID)),
    ):  # fmt: skip
        assert judge([row]) == ([row], []), row


def test_messages_are_brought_to_one_form() -> None:
    raw = [{"role": "Human", "content": " q "}, {"role": "gpt", "content": "<think>\nhm\n</think>\n\na"}]
    [[row], []] = MessageNormalizer()([{"messages": [*raw, {"role": "model", "content": "b", "thinking": "t"}]}])
    assert row["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "assistant", "content": "b", "reasoning_content": "t"},
    ]


def test_what_follows_the_last_answer_is_removed() -> None:
    [[row], []] = MessageSanityFilter()([talk(QUESTION, ANSWER, "And?")])
    assert row == talk(QUESTION, ANSWER)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_damaged_text_is_repaired(encoding: str) -> None:
    damaged = "Köln – schön".replace("–", "-").encode().decode(encoding)
    row = talk(QUESTION, damaged + "\u200b e\u0301 \x00", [])
    row["messages"][-1] = {"role": "user", "content": [{"type": "text", "text": damaged}]}
    [[fixed], []] = FixUnicodeFilter()([row])
    assert fixed["messages"][1]["content"] == "Köln - schön é "
    assert fixed["messages"][2]["content"] == [{"type": "text", "text": "Köln - schön"}]
    sound = talk("Âge d'or à Paris, 100 €", "Ça va ? Ã is a letter.")
    assert FixUnicodeFilter()([sound]) == ([sound], [])


def test_repeated_sentences_are_removed_from_answers() -> None:
    [[row], []] = RemoveRepeatSentencesFilter()([talk("Why? Why?", "Yes. Yes. No.\nYes.")])
    assert row == talk("Why? Why?", "Yes. No.\nYes.")


def test_a_beginning_is_kept_once_over_all_calls() -> None:
    judge = DedupFilter(max_per_sig=2, asst_chars=5)
    rows = [talk(QUESTION, ANSWER, n=number) for number in range(3)]
    assert judge(rows[:1]) == (rows[:1], [])
    assert judge(rows[1:]) == ([rows[1]], [{**rows[2], "drop_reason": "duplicate"}])
    assert judge([talk(QUESTION, "Another answer.")])[1] == []


# The pipeline


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_a_pipeline_works_in_a_data_set_and_logs_what_it_drops(tmp_path: Path, batch_size: int) -> None:
    log = tmp_path / "logs" / "dropped.jsonl"
    rows = [
        GOOD,
        talk("Hello!", ANSWER, id=2),
        talk(QUESTION, "Sorry, I cannot.", id=3),
        talk("Why? " + QUESTION, ANSWER, id=4),
    ]
    pipeline = [HardFilter(), RefuseFilter(), DedupFilter()]
    data = Dataset(DatasetMeta(data=rows))
    data.map(QualityPreprocessor(pipeline, dropped_log_path=str(log)), batch_size=batch_size)
    assert data["id"] == [1, 4]
    assert data.column_names == ["messages", "id"]
    dropped = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["id"], row["drop_reason"]) for row in dropped] == [
        (2, "trivial question"),
        (3, "short answer without reasoning"),
    ]


def test_own_functions_are_filters_too() -> None:
    made = QualityPreprocessor([lambda rows: (rows[1:], rows[:1])])({"messages": [[], [1]], "id": [1, 2]})
    assert made == {"messages": [[1]], "id": [2]}
    assert QualityPreprocessor([lambda rows: ([], rows)])({"messages": [[]], "id": [1]}) == {"messages": [], "id": []}
    with pytest.raises(DataError, match=r"returned no pair \(kept, dropped\)"):
        QualityPreprocessor([lambda rows: rows])({"messages": [[]]})
    with pytest.raises(ArgumentError, match=r"give an instance, such as HardFilter\(\)"):
        QualityPreprocessor([HardFilter])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "build",
    [
        lambda: DedupFilter(0),
        lambda: DeadLoopFilter(1),
        lambda: RemoveRepeatSentencesFilter(0),
        lambda: SpecialCharsFilter(0.2, 0.5),
        lambda: TokenNumFilter("x", 3, 2),
    ],
)
def test_numbers_outside_their_range_are_refused(build: Any) -> None:
    with pytest.raises(ArgumentError, match="must be"):
        build()


# Models


def test_a_sampler_answers_for_filters() -> None:
    class Answers:
        template = None

        def sample(self, inputs: Any, params: Any) -> Any:
            self.asked = (inputs, params.temperature, params.max_tokens)
            texts = ["<think>\nhm\n</think>\n\na", "b"][: params.num_samples]
            sequences = [SampledSequence("stop", [1], None, text) for text in texts]
            return [SampleResponse(sequences, prompt_logprobs=[None, -0.5])]

    sampler = Answers()
    backend = SamplerBackend(sampler)
    assert isinstance(backend, LLMBackend)
    messages = [{"role": "user", "content": "q"}]
    assert backend.chat(messages, temperature=0.3, max_tokens=5, n=2) == [
        {"content": "a", "reasoning_content": "hm"},
        {"content": "b", "reasoning_content": ""},
    ]
    assert sampler.asked == ([{"messages": messages}], 0.3, 5)
    assert backend.prompt_logprobs(messages) == [None, -0.5]
    with pytest.raises(Unsupported, match="no filter uses embeddings"):
        SamplerBackend(sampler, "http://x")

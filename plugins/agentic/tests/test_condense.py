"""Long conversations: chunks, condensers, the tool that returns blocks, and the rollout that uses them."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import ArgumentError, DataError
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer
from twinkle_agentic.chunker import Chunker, NativeChunker
from twinkle_agentic.condenser import Condenser, KeywordCondenser, ModelCondenser
from twinkle_agentic.data_format import Chunk, Chunks
from twinkle_agentic.examples import ScriptedSampler
from twinkle_agentic.rollout import MultiTurnCondenseRollout
from twinkle_agentic.tools import CalculatorTool, ExtractCondensed, ToolManager

TEMPLATE = Template(tokenizer=tiny_tokenizer())
CURIE = (
    "Marie Curie was born in Warsaw in 1867. She studied in Paris. Marie Curie discovered polonium with Pierre Curie. "
    "The Nobel Prize was awarded to Marie Curie in 1903. Radium and polonium are radioactive elements, and radium made "
    "her famous. Her notebooks are kept in lead boxes because they are still radioactive."
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# Chunks


@settings(max_examples=60, deadline=None)
@given(st.text("ab .,\n。!", max_size=80), st.integers(1, 12))
def test_pieces_are_short_and_joined_they_are_the_text(text: str, size: int) -> None:
    pieces = NativeChunker(size).split(text)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_a_text_is_divided_at_the_coarsest_separator() -> None:
    text = "One two.\n\nThree four. Five six.\n\nSeven"
    assert NativeChunker(14).split(text) == ["One two.\n\n", "Three four.", " Five six.\n\n", "Seven"]
    assert NativeChunker(12, separators=[]).split("a" * 30) == ["a" * 12, "a" * 12, "a" * 6]


def test_passages_are_not_joined() -> None:
    text = "Intro\n[1] a\n[2] b\n[3] " + "c d " * 5
    pieces = NativeChunker(12, passage_boundary_re=r"^\[\d+\]").split(text)
    assert pieces[:3] == ["Intro\n", "[1] a\n", "[2] b\n"]
    assert "".join(pieces) == text


CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        user("One sentence. Another sentence.\n\nA paragraph."),
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "weight": 0},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "f"},
        {"role": "tool", "content": "2", "tool_call_id": "d", "name": "f"},
        user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]),
    ]
}


def test_chunks_become_the_conversation_again() -> None:
    chunks = NativeChunker(20)(CONVERSATION)  # type: ignore[arg-type]
    assert isinstance(NativeChunker(), Chunker)
    assert [chunk["content"] for chunk in chunks.chunks if chunk["round"] == 1 and chunk["role"] == "user"] == [
        "One sentence.", " Another sentence.\n\n", "A paragraph.",
    ]  # fmt: skip
    assert [chunk["round"] for chunk in chunks.chunks if chunk["role"] == "system"] == [0]
    assert chunks.chunks[-1]["round"] == 2
    messages = chunks.to_trajectory()["messages"]
    assert messages[3].pop("content") == ""
    assert messages == [
        {k: v for k, v in m.items() if not (k == "content" and v == "")} for m in CONVERSATION["messages"]
    ]


def test_chunks_in_the_published_form_become_messages() -> None:
    chunks = [
        Chunk(type="text", content="a", role="user", round=1),
        Chunk(type="text", content="b", role="user", round=1, raw={"condensed": True, "original": "bbb"}),
        Chunk(type="image", content="i.png", role="user", round=1),
        Chunk(type="text", content="c", role="assistant", round=1),
    ]
    assert Chunks(chunks=chunks).to_trajectory() == {
        "messages": [user("a\n\n<block_1>b</block_1>"), {"role": "assistant", "content": "c"}],
        "images": ["i.png"],
    }
    assert Chunks(chunks).to_trajectory(block_wrapper=None)["messages"][0]["content"] == "a\n\nb"
    assert Chunks(chunks).to_trajectory(("[{n}:", "]"))["messages"][0]["content"] == "a\n\n[1:b]"
    with pytest.raises(ArgumentError, match="must be a pair of texts or None"):
        Chunks(chunks).to_trajectory("x")  # type: ignore[arg-type]


# Condensers


def of(text: str, **keys: Any) -> Chunks:
    return Chunks([{"type": "text", "content": text, "role": "user", "round": 1, **keys}])  # type: ignore[typeddict-item]


def test_keywords_names_and_relations_of_a_text() -> None:
    [chunk] = KeywordCondenser(compression_ratio=1.2)(of(CURIE)).chunks
    opening, relations, more = chunk["content"].split("\n")
    assert opening == "Open: Marie Curie was born in Warsaw in 1867."
    assert relations.startswith(
        "Rel: (Marie Curie | was | born in Warsaw in 1867); (Marie Curie | discovered | polonium"
    )
    assert "She" not in relations
    assert more.startswith("More: ")
    assert {"Pierre Curie", "Nobel Prize"} <= set(more.removeprefix("More: ").split(", "))
    assert len(chunk["content"]) <= math.ceil(len(CURIE) / 1.2)
    assert chunk["raw"] == {"condensed": True, "original": CURIE}


@settings(max_examples=80, deadline=None)
@given(st.text(min_size=1, max_size=300), st.floats(1.01, 30))
def test_a_budget_is_never_exceeded(text: str, ratio: float) -> None:
    [chunk] = KeywordCondenser(compression_ratio=ratio, min_chars=0)(of(text)).chunks
    if text.strip():
        assert len(chunk["content"]) <= math.ceil(len(text) / ratio)
        assert chunk["raw"]["original"] == text
    else:
        assert chunk["content"] == text


def test_parts_can_be_left_out() -> None:
    [chunk] = KeywordCondenser(0, 0, 2, compression_ratio=2)(of(CURIE)).chunks
    assert chunk["content"].startswith("More: ")
    assert len(chunk["content"].split(", ")) == 2


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        (of(CURIE, role="assistant"), {}),
        (of(CURIE), {"min_chars": 2000}),
        (of(CURIE), {"rounds": [2]}),
        (of(CURIE), {"skip_roles": ["user"]}),
        (of(CURIE, raw={"condensed": True}), {}),
        (of(CURIE, type="image"), {}),
    ],
)
def test_other_chunks_stay(chunks: Chunks, options: dict[str, Any]) -> None:
    sampler = Writes("short")
    for condenser in (KeywordCondenser(**options), ModelCondenser(sampler, **options)):
        assert isinstance(condenser, Condenser)
        assert condenser(chunks) == chunks
    assert sampler.prompts == []


class Writes:
    """A sampler that writes texts, one after the other; the last one is repeated."""

    template = None

    def __init__(self, *texts: str) -> None:
        self.texts, self.prompts, self.calls = list(texts), [], []  # type: ignore[var-annotated]

    def sample(self, inputs: Any, sampling_params: SamplingParams, **kwargs: Any) -> list[SampleResponse]:
        self.calls.append((len(inputs), sampling_params, kwargs))
        responses = []
        for row in inputs:
            self.prompts.append(row["messages"])
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
            responses.append(SampleResponse([SampledSequence("stop", [1], None, text)]))
        return responses


def test_a_model_shortens_chunks_and_hears_the_question() -> None:
    question: Chunk = {"type": "text", "content": "Question: {text} who?", "role": "user", "round": 1}
    sampler = Writes("<think>\nhm\n</think>\n\n## Summary\nshort<|im_end|>", "x" * 1000)
    chunks = Chunks([question, *of(CURIE).chunks, *of(CURIE + "!").chunks])

    def query(chunk: Chunk) -> str | None:
        return chunk["content"] if chunk["content"].startswith("Question:") else None

    found = ModelCondenser(sampler, related_query=query, min_chars=10, skip_pattern="^Question:", min_budget_chars=1)(
        chunks
    )
    assert found.chunks[0] == question
    assert found.chunks[1]["content"] == "## Summary\nshort"
    assert found.chunks[1]["raw"]["original"] == CURIE
    assert found.chunks[2] == chunks.chunks[2], "what is not shorter is dropped"
    [(count, params, options)] = sampler.calls
    assert (count, params.temperature, params.num_samples, options) == (2, 0.0, 1, {"use_base_model": True})
    system, asked = sampler.prompts[0]
    assert "## Summary" in system["content"]
    assert "Question: {text} who?" in asked["content"]
    assert asked["content"].endswith(f"Passage:\n{CURIE}")
    assert f"{math.ceil(len(CURIE) / 2)} characters" in asked["content"]


def test_batches_are_filled_and_an_adapter_may_write() -> None:
    sampler = Writes("short")
    chunks = Chunks(of(CURIE).chunks * 3)
    found = ModelCondenser(sampler, batch_size=2, lora_path="adapter", user_prompt_template="{budget}: {text}")(chunks)
    assert [chunk["content"] for chunk in found.chunks] == ["short"] * 3
    assert [(count, options) for count, _, options in sampler.calls] == [(2, {"adapter_path": "adapter"})] * 2
    assert sampler.prompts[0][1]["content"] == f"250: {CURIE}"


def test_a_sampler_that_loses_prompts_is_an_error() -> None:
    sampler = Writes("short")
    sampler.sample = lambda *args, **kwargs: []  # type: ignore[method-assign]
    with pytest.raises(DataError, match="0 responses for 1 prompts"):
        ModelCondenser(sampler)(of(CURIE))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NativeChunker(0), "chunk_size must be at least 1"),
        (lambda: NativeChunker(separators="."), "separators must be a list"),
        (lambda: NativeChunker(passage_boundary_re="("), "not a regular expression"),
        (lambda: KeywordCondenser(compression_ratio=1.0), "compression_ratio must be above 1, got 1.0"),
        (lambda: KeywordCondenser(num_keywords=-1), "num_keywords must be a whole number of at least 0"),
        (lambda: KeywordCondenser(spacy_model="en_core_web_sm"), "reads no model of spaCy"),
        (lambda: KeywordCondenser(skip_roles="user"), "skip_roles must be a list"),
        (lambda: KeywordCondenser()(of("a"), more=1), "takes no argument 'more' in a call"),
        (lambda: ModelCondenser(None), r"sampler must have sample\(\)"),
        (lambda: ModelCondenser(Writes("a"), user_prompt_template="{text}"), "must contain {budget}"),
        (lambda: ModelCondenser(Writes("a"), skip_pattern="("), "not a regular expression"),
        (lambda: ModelCondenser(Writes("a"), batch_size=0), "batch_size must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build()


# The tool and the rollout


def test_a_block_is_returned_once_by_its_number() -> None:
    chunks = Chunks([*of("plain").chunks, *KeywordCondenser()(Chunks(of(CURIE).chunks * 2)).chunks])
    tool = ExtractCondensed(chunks)
    assert (tool.blocks, len(tool), 2 in tool, 3 in tool) == ([1, 2], 2, True, False)
    name = tool.tool_info()["function"]["name"]
    assert name == "extract_condensed"
    assert tool(name, {"blocks": 2}) == CURIE
    assert tool(name, {"blocks": 2}) == "Block 2 was returned before; read that result again."
    assert tool(name, {"block": "1"}) == CURIE
    assert tool(name, {"blocks": 7}) == "Error: there is no block 7; blocks are 1 to 2."
    for wrong in ([1, 2], 1.5, True, "one", None):
        assert tool(name, {"blocks": wrong}).startswith('Error: "blocks" must be the number of one block')


def rollout(texts: list[str], **options: Any) -> MultiTurnCondenseRollout:
    sampler = ScriptedSampler(texts, TEMPLATE)
    tools = ToolManager([CalculatorTool()])
    parts = {"chunker": NativeChunker(400), "condenser": KeywordCondenser(compression_ratio=4.0)}
    return MultiTurnCondenseRollout(sampler, TEMPLATE, tools, **{**parts, **options})


def test_a_model_reads_the_short_text_and_asks_for_the_whole() -> None:
    call = '<tool_call>{"name": "extract_condensed", "arguments": {"blocks": 1}}</tool_call>'
    seen: list[Any] = []
    rows: list[Any] = [{"messages": [user(CURIE)], "user_data": [("id", str(n))]} for n in range(2)]
    found: list[Any] = rollout([call, "In Warsaw."], post_compress_callback=lambda row, chunks: seen.append(row))(rows)
    for number, row in enumerate(found):
        asked, _, result, answer = row["messages"]
        assert asked["content"].startswith("<block_1>Open: Marie Curie")
        assert len(asked["content"]) < len(CURIE) / 2
        assert result["content"] == CURIE
        assert answer["content"] == "In Warsaw."
        assert row["user_data"] == [("id", str(number))]
        assert {tool["function"]["name"] for tool in row["tools"]} == {"calculator", "extract_condensed"}
        assert CURIE not in TEMPLATE.decode(row["input_ids"][: row["labels"].index(-100) + 40])
    assert [row["messages"] for row in seen] == [[found[0]["messages"][0]]] * 2
    assert rows[0]["messages"] == [user(CURIE)]


def test_equal_trajectories_are_condensed_once_in_one_call() -> None:
    calls: list[int] = []

    class Counts(KeywordCondenser):
        def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
            calls.append(len(chunks.chunks))
            return super().__call__(chunks)

    rows: list[Any] = [{"messages": [user(text)]} for text in (CURIE, CURIE, CURIE + " More.")]
    found: list[Any] = rollout(["ok"], condenser=Counts(), condenser_kwargs={"note": 1})(rows)
    assert calls == [2]
    assert found[0]["messages"][0] == found[1]["messages"][0] != found[2]["messages"][0]


def test_short_trajectories_are_played_as_they_are() -> None:
    [row] = rollout(["5"])([{"messages": [user("2 + 3?")]}])
    assert row["messages"][0] == user("2 + 3?")
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calculator"]


def test_a_second_tool_of_that_name_is_refused() -> None:
    tools = ToolManager([ExtractCondensed(Chunks([]))])
    with pytest.raises(ArgumentError, match="has a tool 'extract_condensed' already"):
        MultiTurnCondenseRollout(ScriptedSampler(["a"], TEMPLATE), TEMPLATE, tools, NativeChunker(), KeywordCondenser())
    with pytest.raises(ArgumentError, match="chunker must be callable, got NoneType"):
        rollout(["a"], chunker=None)


def test_rewards_are_at_their_published_path() -> None:
    import twinkle.reward
    import twinkle_agentic.reward as published

    assert published.__all__ == ["CoTReward", "F1Reward", "ToolExploreReward"]
    assert all(getattr(published, name) is getattr(twinkle.reward, name) for name in published.__all__)
    row: Mapping[str, Any] = {
        "messages": [{"role": "assistant", "content": "\\boxed{the red house}"}],
        "user_data": [("ground_truth", "a house"), ("ground_truth", "red house")],
    }
    assert published.F1Reward()([row]) == [1.0]
    with pytest.raises(ImportError):
        exec("from twinkle_agentic.reward import Nothing")

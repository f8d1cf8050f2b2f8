"""Labels cover exactly what the assistant writes, in every shape of chat template, whatever the text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.errors import EncodeError
from twinkle.template import Template
from twinkle.testing import CHATML, tiny_tokenizer
from twinkle_chat.encoding import mark_tokens, shift

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + m.content.lstrip('\n') }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
R1 = (  # opens the reasoning in the prompt, and shows none of it afterwards
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
PLAIN = (  # no token ends a turn
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SHAPES: dict[str, dict[str, Any]] = {
    "chatml": {"template": CHATML, "end": "<|im_end|>"},
    "generation": {"template": GENERATION, "end": "<|im_end|>"},
    "llama3": {
        "template": LLAMA3,
        "end": "<|eot_id|>",
        "special": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "shown": str.strip,
    },
    "mistral": {"template": MISTRAL, "end": "</s>", "special": ("</s>", "[INST]", "[/INST]"), "eos": "</s>"},
    "phi3": {"template": PHI3, "end": "<|end|>", "special": ("<|user|>", "<|assistant|>", "<|end|>")},
    "r1": {"template": R1, "end": "<|im_end|>", "special": ("<|user|>", "<|assistant|>")},
    "plain": {"template": PLAIN, "end": ""},
}

TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=12)
EDGES = st.builds(
    lambda a, b, c: a + b + c, st.sampled_from(["", "\n", " ", "\n\n"]), TEXT, st.sampled_from(["", "\n", " "])
)
WORDS = st.one_of(
    EDGES, st.sampled_from(["", "你好，世界", "👩‍👩‍👧 ok", "<think>", "e\u0301", "user\n", "assistant\n", "[/INST]"])
)


def template(shape: str, **options: Any) -> Template:
    values = SHAPES[shape]
    tokenizer = tiny_tokenizer(values["template"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(values.get("special", ()))})
    tokenizer.eos_token = values.get("eos", "<|im_end|>")
    return Template(tokenizer=tokenizer, **options)


TEMPLATES = {shape: template(shape) for shape in SHAPES}


def trained(encoder: Template, feature: Any) -> list[str]:
    """Return the trained texts: runs of targets, each decoded."""
    runs: list[list[int]] = [[]]
    for label in feature["labels"]:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [encoder.decode(run) for run in runs if run]


def talk(*turns: str, system: str | None = None) -> dict[str, Any]:
    roles = ["user", "assistant"]
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    return {"messages": ([{"role": "system", "content": system}] if system is not None else []) + messages}


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=st.none() | WORDS)
def test_the_trained_text_is_the_assistants_text_and_its_end(
    shape: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    encoder, values = TEMPLATES[shape], SHAPES[shape]
    if shape in ("mistral", "r1"):
        system = None
    row = talk(*(text for turn in turns for text in turn), system=system)
    feature: Any = encoder.encode(row)
    shown = values.get("shown", str)
    expected = "".join(shown(answer) + values["end"] for _, answer in turns)
    assert encoder.decode([label for label in feature["labels"] if label != -100]) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_each_label_is_the_next_token_and_the_last_is_none(shape: str) -> None:
    encoder = TEMPLATES[shape]
    feature: Any = encoder.encode(talk("one", "two", "three", "four"))
    ids, labels = feature["input_ids"], feature["labels"]
    assert labels[-1] == -100
    assert all(label in (-100, following) for label, following in zip(labels[:-1], ids[1:], strict=True))
    assert len(trained(encoder, feature)) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_tokenizers_own_chat_template(shape: str) -> None:
    encoder, row = TEMPLATES[shape], talk("héllo", "你好\n", "x", "y")
    own = encoder.tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
    assert encoder.encode(row)["input_ids"] == own["input_ids"]
    prompt = {"messages": row["messages"][:3]}
    own = encoder.tokenizer.apply_chat_template(
        prompt["messages"], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    assert encoder.encode(prompt, add_generation_prompt=True)["input_ids"] == own["input_ids"]


def test_the_generated_parts_of_a_chat_template_agree_with_transformers() -> None:
    encoder, row = TEMPLATES["generation"], talk("a", "plain ascii", "b", "more")
    own = encoder.tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoder.encode(row)["labels"] == shift(own["input_ids"], own["assistant_masks"])


def test_a_prompt_trains_nothing() -> None:
    feature: Any = TEMPLATES["chatml"].encode(talk("a", "b", "c"), add_generation_prompt=True)
    assert set(feature["labels"]) == {-100}


def test_a_conversation_that_the_assistant_opens_is_trained_too() -> None:
    row = {"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]}
    for shape in ("chatml", "llama3", "generation"):
        assert trained(TEMPLATES[shape], TEMPLATES[shape].encode(row)) == ["hello" + SHAPES[shape]["end"]]


def test_two_assistant_turns_in_a_row_are_told_apart() -> None:
    row = {"messages": [{"role": r, "content": c} for r, c in (("user", "u"), ("assistant", "a"), ("assistant", "a"))]}
    assert trained(TEMPLATES["chatml"], TEMPLATES["chatml"].encode(row)) == ["a<|im_end|>", "a<|im_end|>"]


# Reasoning: earlier turns lose theirs, so a prefix of the conversation is no prefix of its text


QWEN = {thinking: Template(tokenizer=tiny_tokenizer(QWEN3), enable_thinking=thinking) for thinking in (True, False)}


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=3), thinking=st.booleans())
def test_reasoning_is_trained_where_the_chat_template_shows_it(
    turns: list[tuple[str, str, str]], thinking: bool
) -> None:
    messages = []
    for question, reasoning, answer in turns:
        reasoning = reasoning.replace("think", "") + "r"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": "A" + answer, "reasoning_content": reasoning})
    encoder = QWEN[thinking]
    feature: Any = encoder.encode({"messages": messages})
    opening = "<think>\n" if thinking else ""
    *earlier, last = messages[1::2]
    expected = "".join(message["content"] + "<|im_end|>" for message in earlier)
    expected += f"{opening}{last['reasoning_content'].strip(chr(10))}\n</think>\n\n{last['content']}<|im_end|>"
    assert encoder.decode([label for label in feature["labels"] if label != -100]) == expected


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("thinking", [True, False])
def test_an_empty_thought_that_the_chat_template_adds_is_shown_and_not_trained(thinking: bool) -> None:
    feature: Any = QWEN[thinking].encode(talk("q", "<odd", "q", "yes"))
    assert trained(QWEN[thinking], feature) == ["<odd<|im_end|>", "yes<|im_end|>"]
    assert EMPTY + "yes" in QWEN[thinking].decode(feature["input_ids"])


def test_an_empty_thought_that_the_row_has_is_trained() -> None:
    inline = talk("q", EMPTY + "yes")
    apart = {"messages": [*talk("q")["messages"], {"role": "assistant", "content": "yes", "reasoning_content": ""}]}
    for row in (inline, apart):
        assert trained(QWEN[True], QWEN[True].encode(row)) == [EMPTY + "yes<|im_end|>"]
        assert trained(QWEN[False], QWEN[False].encode(row)) == ["yes<|im_end|>"]
    chatml = TEMPLATES["chatml"]
    assert trained(chatml, chatml.encode(inline)) == [EMPTY + "yes<|im_end|>"]


def test_a_think_block_in_the_content_is_reasoning() -> None:
    inline = talk("q", "<think>\nwhy\n</think>\n\nyes")
    apart = {"messages": [*talk("q")["messages"], {"role": "assistant", "content": "yes", "reasoning_content": "why"}]}
    assert QWEN[True].encode(inline)["input_ids"] == QWEN[True].encode(apart)["input_ids"]
    assert trained(QWEN[True], QWEN[True].encode(inline)) == ["<think>\nwhy\n</think>\n\nyes<|im_end|>"]


def test_reasoning_is_put_into_the_content_for_chat_templates_that_know_none() -> None:
    row = {"messages": [*talk("q")["messages"], {"role": "assistant", "content": "yes", "reasoning_content": "why"}]}
    assert trained(TEMPLATES["chatml"], TEMPLATES["chatml"].encode(row)) == ["<think>\nwhy\n</think>\n\nyes<|im_end|>"]


@pytest.mark.parametrize("content", ["let me see", "", None])
@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln", "unit": None}])
@pytest.mark.parametrize("reasoning", ["hm", None])
def test_tool_calls_are_trained_with_their_turn(content: str | None, arguments: Any, reasoning: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "weather?", "tool_calls": None},
        {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "<ok>"},
    ]
    shown = (
        f'{content or ""}\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Köln"}}}}\n</tool_call><|im_end|>'
    )
    for thinking in (True, False):
        feature = QWEN[thinking].encode({"messages": messages})
        assert trained(QWEN[thinking], feature) == [shown, "It rains.<|im_end|>", "<ok><|im_end|>"]


# Turns named by key_rounds


@pytest.mark.parametrize("shape", ["chatml", "generation", "llama3"])
def test_key_rounds_restricts_training_to_some_turns(shape: str) -> None:
    encoder, end = TEMPLATES[shape], SHAPES[shape]["end"]
    row = talk("a", "b", "c", "d") | {"user_data": [("key_rounds", "[3]"), ("other", '"x"')]}
    feature: Any = encoder.encode(row)
    assert trained(encoder, feature) == ["d" + end]
    assert feature["user_data"] == row["user_data"]
    assert trained(encoder, encoder.encode(row | {"user_data": {"key_rounds": []}})) == []


def test_key_rounds_counts_the_rows_own_messages_also_behind_a_default_system() -> None:
    encoder = template("chatml", default_system="be kind")
    row = talk("a", "b", "c", "d") | {"user_data": [("key_rounds", "[1]")]}
    assert trained(encoder, encoder.encode(row)) == ["b<|im_end|>"]
    for rounds in ((1,), 1, [1]):
        assert trained(encoder, encoder.encode(row | {"user_data": {"key_rounds": rounds}})) == ["b<|im_end|>"]
    with pytest.raises(EncodeError, match=r"has 2, which is a user message; .* are \[1, 3\]"):
        encoder.encode(row | {"user_data": {"key_rounds": 2}})


@pytest.mark.parametrize(
    ("rounds", "found"), [("[0]", "a user message"), ("[9]", "no message"), ('["1"]', "'1'"), ("1.5", "1.5")]
)
def test_key_rounds_that_name_no_assistant_turn_are_refused(rounds: str, found: str) -> None:
    with pytest.raises(EncodeError, match=r"key_rounds.*\[1, 3\]") as error:
        TEMPLATES["chatml"].encode(talk("a", "b", "c", "d") | {"user_data": [("key_rounds", rounds)]})
    assert found in str(error.value)


def test_key_rounds_need_one_generated_part_a_turn() -> None:
    halves = GENERATION.replace("{% generation %}", "{% if loop.last %}{% generation %}", 1).replace(
        "{% endgeneration %}", "{% endgeneration %}{% endif %}", 1
    )
    encoder = Template(tokenizer=tiny_tokenizer(halves))
    assert trained(encoder, encoder.encode(talk("a", "b", "c", "d"))) == ["d<|im_end|>"]
    with pytest.raises(EncodeError, match="1 generated parts for 2 assistant turns"):
        encoder.encode(talk("a", "b", "c", "d") | {"user_data": [("key_rounds", "[1]")]})


# Turns that say themselves whether they are trained


def marked(*marks: dict[str, Any]) -> dict[str, Any]:
    row = talk("a", "b", "c", "d")
    for message, mark in zip(row["messages"], marks, strict=True):
        message.update(mark)
    return row


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"weight": 0, "loss": False}])
@pytest.mark.parametrize("shape", ["chatml", "generation", "llama3"])
def test_a_turn_with_weight_zero_or_without_loss_is_not_trained(shape: str, off: dict[str, Any]) -> None:
    encoder, end = TEMPLATES[shape], SHAPES[shape]["end"]
    assert trained(encoder, encoder.encode(marked({}, off, {}, {}))) == ["d" + end]
    assert trained(encoder, encoder.encode(marked(off, {"weight": 1}, {}, {"loss": True}))) == ["b" + end, "d" + end]
    both = marked({}, off, {}, {}) | {"user_data": {"key_rounds": [1]}}
    assert trained(encoder, encoder.encode(both)) == []


def test_weights_hold_behind_a_default_system_and_without_a_chat_template() -> None:
    encoder = template("chatml", default_system="be kind")
    assert trained(encoder, encoder.encode(marked({}, {"weight": 0}, {}, {}))) == ["d<|im_end|>"]
    with pytest.raises(EncodeError, match=r"message 2 \(user\) requests training by weight or loss"):
        encoder.encode(marked({}, {}, {"weight": 1}, {}))
    plain: Any = template("chatml", use_chat_template=False)
    message = {"role": "user", "content": "a"}
    assert set(plain.encode({"messages": [message | {"loss": False}]})["labels"]) == {-100}
    assert set(plain.encode({"messages": [message | {"content": "ab", "loss": True}]})["labels"]) != {-100}


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"weight": 2}, r"message 1 \(assistant\) has weight 2; it must be 0"),
        ({"weight": 0.5}, "has weight 0.5"),
        ({"weight": "0"}, "has weight '0'"),
        ({"weight": False}, "has weight False"),
        ({"loss": 0}, "has loss 0; it must be true"),
        ({"loss": "false"}, "has loss 'false'"),
        ({"weight": 1, "loss": False}, "weight 1 and loss False, which contradict each other"),
    ],
)
def test_another_weight_or_loss_is_refused(mark: dict[str, Any], message: str) -> None:
    with pytest.raises(EncodeError, match=message):
        TEMPLATES["chatml"].encode(marked({}, mark, {}, {}))


# Where turns cannot be found, nothing is guessed


def test_a_chat_template_that_changes_the_text_by_what_it_says_is_refused() -> None:
    shout = "{% for m in messages %}{{ m['content'] | length }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(EncodeError, match=r"message 1 \(assistant\) cannot be located.*generation"):
        Template(tokenizer=tiny_tokenizer(shout)).encode(talk("a", "b"))
    silent = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(EncodeError, match="message 1"):
        Template(tokenizer=tiny_tokenizer(silent)).encode(talk("a", "b"))


def test_a_special_token_of_the_next_turn_does_not_end_this_one() -> None:
    open_end = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    open_end += "{{ '<|im_end|>' if m['role'] == 'user' else '\\n' }}{% endfor %}"
    encoder = Template(tokenizer=tiny_tokenizer(open_end))
    assert trained(encoder, encoder.encode(talk("a", "b\n", "c", "d"))) == ["b\n", "d"]


def test_text_is_tokenized_once_however_many_turns() -> None:
    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer, self.calls, self.characters = tokenizer, 0, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

        def __len__(self) -> int:
            return len(self.tokenizer)

        def __call__(self, text: str, **kwargs: Any) -> Any:
            self.calls, self.characters = self.calls + 1, self.characters + len(text)
            return self.tokenizer(text, **kwargs)

    tokenizer = Counting(tiny_tokenizer())
    feature: Any = Template(tokenizer=tokenizer).encode(talk(*["word"] * 40))
    assert (tokenizer.calls, tokenizer.characters) == (1, len(tiny_tokenizer().decode(feature["input_ids"])))


# Tokenizers that merge, and those that write spaces into tokens


def _merging_tokenizer(trim_offsets: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False
    )
    raw.train_from_iterator(["the cat  sat on the mat\n\n the 猫 the 猫 assistant user hello  \n\n"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_merged_tokens_are_trained_whole(trim_offsets: bool) -> None:
    encoder = Template(tokenizer=_merging_tokenizer(trim_offsets))
    for answer in ("the cat  sat", " the 猫  \n\n", "猫猫😀", "  ", "hello \n"):
        assert trained(encoder, encoder.encode(talk("the", answer)))[0].lstrip("\n") == answer + "<|im_end|>"


def _sentencepiece_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlo", "▁a", "he", "ll", "▁▁"]
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("▁", "▁")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("</s>", "[INST]", "[/INST]")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer


@pytest.mark.parametrize("answer", ["hello a", "😀 猫\n", "\n猫", "ab  c", ""])
def test_the_space_before_the_first_word_is_the_models_to_write(answer: str) -> None:
    encoder = Template(tokenizer=_sentencepiece_tokenizer())
    assert trained(encoder, encoder.encode(talk("猫", answer, "h", answer))) == [f" {answer}</s>"] * 2


def test_a_token_that_reaches_over_the_edge_of_a_turn_is_trained() -> None:
    assert mark_tokens([(0, 2), (2, 5), (5, 7), (7, 9)], [(3, 6)]) == [False, True, True, False]


def test_an_empty_offset_stands_for_what_lies_between() -> None:
    # Offsets of "a", " ", "b" by a tokenizer that trims white space off its offsets.
    assert mark_tokens([(0, 1), (2, 2), (2, 3)], [(1, 3)]) == [False, True, True]
    assert mark_tokens([(0, 1), (2, 2), (2, 3)], [(0, 1)]) == [True, False, False]


@given(
    lengths=st.lists(st.integers(1, 4), max_size=30),
    edges=st.lists(st.integers(0, 60), max_size=8, unique=True).map(sorted),
)
def test_marking_agrees_with_a_character_by_character_count(lengths: list[int], edges: list[int]) -> None:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    offsets = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    marked = {place for start, end in spans for place in range(start, end)}
    assert mark_tokens(offsets, spans) == [any(place in marked for place in range(*offset)) for offset in offsets]


def test_the_last_position_never_learns_the_first_token() -> None:
    assert shift([5, 6, 7], [True, True, True]) == [6, 7, -100]
    assert shift([], []) == []

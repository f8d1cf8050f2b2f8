"""A loss scale weights roles, turns and pieces of turns; the weights stay with their labels through everything."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, ComponentNotFound, ComponentTypeError, EncodeError
from twinkle.loss_scale import LossScale
from twinkle.processor import InputProcessor
from twinkle.template import Template
from twinkle.testing import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_PARTS = GENERATION.replace(
    "{% generation %}{{ m['content'] +", "{% generation %}{{ m['content'] }}{% endgeneration %}{% generation %}{{"
)
THINKING = CHATML.replace(
    "message['content'] +",
    "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n'"
    " if message.reasoning_content and loop.last else '')"
    " + message['content'] | trim +",
)
Weights = Sequence[Any]


def talk(*texts: str, **keys: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **keys}


def fixed(*weights: Any) -> Callable[[Any], Weights]:
    return lambda messages: weights


def template(scale: Any, chat_template: str = CHATML, **options: Any) -> Template:
    tokenizer = TOKENIZER if chat_template == CHATML else tiny_tokenizer(chat_template)
    return Template(tokenizer=tokenizer, loss_scale=scale, **options)


def weighed(encoder: Template, row: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the text of each run of trained tokens of one weight."""
    feature: Any = encoder.encode(row)
    runs: list[tuple[list[int], float]] = []
    last = -1
    for place, (label, weight) in enumerate(zip(feature["labels"], feature["loss_scale"], strict=True)):
        assert (label == -100) == (weight == 0)
        if label != -100:
            assert label == feature["input_ids"][place + 1]
            if not runs or runs[-1][1] != weight or last != place - 1:
                runs.append(([], weight))
            runs[-1][0].append(label)
            last = place
    assert feature["labels"][-1:] in ([], [-100])
    return [(encoder.decode(ids), weight) for ids, weight in runs]


END = "<|im_end|>"


# What is weighted


def test_a_turn_has_the_weight_that_the_scale_gives_it() -> None:
    row = talk("a", "bb", "c", "dd")
    assert weighed(template(fixed(0, 0.5, 0, 2)), row) == [(f"bb{END}", 0.5), (f"dd{END}", 2.0)]
    assert weighed(template(fixed(0, 0, 0, 1)), row) == [(f"dd{END}", 1.0)]
    assert weighed(template(fixed(0, 0, 0, 0)), row) == []


@pytest.mark.parametrize("chat_template", [CHATML, GENERATION])
def test_other_roles_may_have_a_weight(chat_template: str) -> None:
    row = talk("a", "bb", "c", "dd")
    assert weighed(template(fixed(0.5, 1, 0, 2), chat_template), row) == [
        (f"a{END}", 0.5),
        (f"bb{END}", 1.0),
        (f"dd{END}", 2.0),
    ]


def test_without_a_scale_rows_have_no_weights() -> None:
    assert "loss_scale" not in template(None).encode(talk("a", "b"))


@given(
    st.lists(st.tuples(st.text("ab \n", max_size=6), st.sampled_from([0, 0.25, 1, 3])), min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_token_has_the_weight_of_its_turn(turns: list[tuple[str, float]], default_system: bool) -> None:
    row = talk(*(text for text, _ in turns))
    encoder = template(fixed(*(w for _, w in turns)), default_system="You are kind." if default_system else None)
    spoken = list(zip(row["messages"], (weight for _, weight in turns), strict=True))
    if default_system:
        spoken.insert(0, ({"role": "system", "content": "You are kind."}, 0))
    expected: list[float] = []
    for message, weight in spoken:
        expected += [0] * (1 + len(message["role"]) + 1) + [weight] * (len(message["content"]) + 1) + [0]
    feature: Any = encoder.encode(row)
    assert feature["loss_scale"] == [*expected[1:], 0.0]
    assert all(isinstance(weight, float) for weight in feature["loss_scale"])
    shifted = [*feature["input_ids"][1:], None]
    assert feature["labels"] == [token if w else -100 for token, w in zip(shifted, feature["loss_scale"], strict=True)]


# What a message says of itself


def test_the_weight_of_a_message_multiplies() -> None:
    row = talk("a", "b", "c", "d")
    row["messages"][1]["weight"] = 0.5
    row["messages"][3]["loss"] = False
    assert weighed(template(fixed(0, 3, 0, 3)), row) == [(f"b{END}", 1.5)]


def test_key_rounds_chooses_among_the_weighted_turns() -> None:
    row = talk("a", "b", "c", "d", user_data=[("key_rounds", "[3]")])
    assert weighed(template(fixed(1, 1, 1, 2)), row) == [(f"d{END}", 2.0)]
    with pytest.raises(EncodeError, match="key_rounds has 2, which is a user message"):
        template(fixed(1, 1, 1, 2)).encode(row | {"user_data": [("key_rounds", "[2]")]})


def test_a_weight_between_needs_a_scale() -> None:
    row = talk("a", "b")
    row["messages"][1]["weight"] = 0.5
    with pytest.raises(EncodeError, match=r"weight 0.5; it must be 0 .* or 1 .*; other weights need a loss scale"):
        template(None).encode(row)
    for wrong in (-1, True, "1", float("nan"), float("inf")):
        row["messages"][1]["weight"] = wrong
        with pytest.raises(
            EncodeError, match=r"message 1 .* has weight .*; with a loss scale it must be a finite number"
        ):
            template(fixed(0, 1)).encode(row)


def test_a_user_who_asks_to_be_trained_must_get_a_weight() -> None:
    row = talk("a", "b")
    row["messages"][0]["weight"] = 1
    assert weighed(template(fixed(1, 0)), row) == [(f"a{END}", 1.0)]
    with pytest.raises(EncodeError, match=r"message 0 \(user\) requests training .* gives it weight 0"):
        template(fixed(0, 1)).encode(row)


# Pieces of a turn


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([("one ", 1), ("two ", 2), ("three", 3)], [("one ", 1), ("two ", 2), (f"three{END}", 3)]),
        ([("two", 2), ("", 1)], [("one two", 2), (f" three{END}", 1)]),
        ([("two", 0), ("three", 1)], [(f" three{END}", 1)]),
        ([(" two\n", 2)], [(f"one two three{END}", 2)]),
        ([("gone", 5), ("three", 1)], [(f"one two three{END}", 1)]),
        ([("two", 5), ("one two", 1), ("", 2)], [("one two", 1), (f" three{END}", 2)]),
        ([("", 1)], [(f"one two three{END}", 1)]),
    ],
)
@pytest.mark.parametrize("chat_template", [CHATML, GENERATION])
def test_pieces_of_a_turn_have_weights_of_their_own(pieces: Any, found: Any, chat_template: str) -> None:
    assert weighed(template(fixed(0, pieces), chat_template), talk("two", "one two three")) == found


def test_pieces_that_stand_nowhere_are_an_error() -> None:
    with pytest.raises(EncodeError, match="message 1: none of the pieces of the loss scale occurs in"):
        template(fixed(0, [("x", 1)])).encode(talk("a", "b"))


def test_a_piece_that_the_chat_template_leaves_out_is_passed_over() -> None:
    row = talk("a", "it is it", "c", "so it is")
    row["messages"][1]["reasoning_content"] = "it"
    row["messages"][3]["reasoning_content"] = "so"
    scale = fixed(0, [("it", 0), ("it is it", 1)], 0, [("so", 0.5), ("so it is", 1)])
    assert weighed(template(scale, THINKING), row) == [
        (f"it is it{END}", 1.0),
        ("<think>\nso", 0.5),
        (f"\n</think>\n\nso it is{END}", 1.0),
    ]


@given(st.lists(st.text("xy ", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_pieces_that_make_up_a_turn_are_found_in_their_places(pieces: list[str]) -> None:
    weights = [(piece, float(number)) for number, piece in enumerate(pieces, 1)]
    feature: Any = template(fixed(0, weights)).encode(talk("q", "".join(pieces)))
    by_character = [weight for piece, weight in weights for _ in piece]
    assert [weight for weight in feature["loss_scale"] if weight] == [*by_character, weights[-1][1]]


# Chat templates that mark otherwise than one part a turn


def test_several_marked_parts_a_turn_can_be_weighted_alike_only() -> None:
    row = talk("a", "b", "c", "d")
    with pytest.raises(EncodeError, match="marks 4 generated parts for 2 assistant turns, so they cannot be weighted"):
        template(fixed(0, 1, 0, 2), TWO_PARTS).encode(row)
    assert weighed(template(fixed(0, 2, 0, 2), TWO_PARTS), row) == [(f"b{END}", 2.0), (f"d{END}", 2.0)]


# The weights travel with the labels


@pytest.mark.parametrize("strategy", ["left", "right", "split"])
@pytest.mark.parametrize("limit", [1, 2, 13, 20, 47, 48, 1000])
def test_truncation_cuts_weights_where_it_cuts_tokens(strategy: Any, limit: int) -> None:
    row = talk("abc", "defg", "hi", "jklmno")
    scale = fixed(0, 0.5, 0, [("jkl", 2), ("mno", 3)])
    whole: Any = template(scale).encode(row)
    tokens, weights = whole["input_ids"], [0.0, *whole["loss_scale"][:-1]]
    parts: Any = template(scale, max_length=limit, truncation_strategy=strategy).encode(row)
    size = min(limit, len(tokens))
    starts = {"left": [len(tokens) - size], "right": [0], "split": range(0, len(tokens), limit)}[strategy]
    for part, start in zip(parts if strategy == "split" else [parts], starts, strict=True):
        assert part["input_ids"] == tokens[start : start + size]
        assert part["loss_scale"] == [*weights[start + 1 : start + size], 0.0][: len(part["input_ids"])]
        assert [label != -100 for label in part["labels"]] == [weight > 0 for weight in part["loss_scale"]]


def test_deleted_rows_and_prompts_have_weights_too() -> None:
    assert template(fixed(0, 1), max_length=3, truncation_strategy="delete").encode(talk("a", "b"))["loss_scale"] == []
    prompt: Any = template(fixed(1)).encode(talk("a"), add_generation_prompt=True)
    assert prompt["loss_scale"] == [0.0] * len(prompt["input_ids"])


def test_sampled_tokens_weigh_one() -> None:
    encoder = template(fixed(1))
    prompt = encoder.encode(talk("a"), add_generation_prompt=True)
    joined: Any = encoder.concat_input_feature(prompt, [98, 99])
    size = len(prompt["input_ids"])
    assert joined["loss_scale"] == [0.0] * (size - 1) + [1.0, 1.0, 0.0]
    assert [label != -100 for label in joined["labels"]] == [weight > 0 for weight in joined["loss_scale"]]


def test_pairs_data_sets_and_batches_carry_weights() -> None:
    pair: Any = template(fixed(0, 2)).encode({"positive": talk("a", "b"), "negative": talk("a", "cd")})
    assert [max(pair[side]["loss_scale"]) for side in pair] == [2.0, 2.0]
    data = Dataset(DatasetMeta(data=[talk("a", "b"), talk("a", "bcd")]))
    data.set_template("Template", tokenizer=TOKENIZER, loss_scale=fixed(0, 0.5))
    data.encode()
    batch: Any = InputProcessor()(list(data))
    assert batch["loss_scale"].shape == batch["labels"].shape
    assert ((batch["loss_scale"] > 0) == (batch["labels"] != -100)).all()
    assert batch["loss_scale"].unique().tolist() == [0.0, 0.5]


# Any form of component argument


class Last(LossScale):
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, messages: Sequence[Any]) -> list[float]:
        return [0.0] * (len(messages) - 1) + [self.weight]


def test_a_scale_is_an_instance_a_class_a_function_or_a_name(tmp_path: Any) -> None:
    row = talk("a", "b")
    (tmp_path / "mine.py").write_text("def scale(messages):\n    return [0, 1]\n")
    for scale in (
        Last(),
        Last,
        fixed(0, 1),
        f"{tmp_path}/mine.py:scale",
        "RoleLossScale",
        "twinkle-data/RoleLossScale",
    ):
        assert weighed(template(scale), row) == [(f"b{END}", 1.0)]
    assert weighed(pickle.loads(pickle.dumps(template(Last(3.0)))), row) == [(f"b{END}", 3.0)]


def test_a_scale_sees_the_rows_own_messages_and_cannot_change_them() -> None:
    seen: list[Any] = []

    def scale(messages: Any) -> list[float]:
        seen.append(messages)
        messages[1]["content"] = "changed"
        return [0.0, 1.0]

    row = talk("a", "b")
    row["messages"][0]["content"] = [{"type": "text", "text": "a"}]
    assert weighed(template(scale, default_system="s"), row) == [(f"b{END}", 1.0)]
    assert [message["content"] for message in seen[0]] == ["a", "changed"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0, 1, 1), "returned 3 weights for 2 messages; return one weight per message"),
        ((0, -1), "returned -1 for message 1; a weight must be a finite number >= 0 or pieces"),
        ((0, float("nan")), "returned nan for message 1"),
        ((0, "1"), "returned '1' for message 1"),
        ((0, None), "returned None for message 1"),
        ((0, True), "returned True for message 1"),
        ((0, [("b", -1)]), "returned -1 for message 1"),
        ((0, ["b"]), r"returned 'b' for a piece of message 1; a piece must be \(text, weight\)"),
    ],
)
def test_what_is_no_weight_is_named_and_no_rows_fault(weights: Any, message: str) -> None:
    encoder = template(fixed(*weights), truncation_strategy="delete")
    with pytest.raises(ComponentTypeError, match=message):
        encoder.encode(talk("a", "b"))
    data = Dataset(DatasetMeta(data=[talk("a", "b")]))
    data.set_template(encoder)
    with pytest.raises(ComponentTypeError, match=message):
        data.encode()


def test_scales_that_are_none_are_refused_at_once() -> None:
    with pytest.raises(ComponentNotFound, match="nearest: 'RoleLossScale'"):
        template("RoleLosScale")
    with pytest.raises(ComponentTypeError):
        template(3)
    with pytest.raises(ComponentTypeError, match="LossScale"):
        template(dict)
    with pytest.raises(ComponentTypeError, match=r"returned a dict for 2 messages"):
        template(lambda messages: {}).encode(talk("a", "b"))
    with pytest.raises(ArgumentError, match="loss_scale cannot be combined with use_chat_template=False"):
        template(Last, use_chat_template=False)


# Chat templates of the families


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "chat_templates").glob("*.jinja")), ids=lambda p: p.stem
)
def test_weights_change_no_labels_in_any_family(path: Path) -> None:
    tokenizer = tiny_tokenizer(path.read_text("utf-8"))
    row = talk("Hi", "Hello", "More?", "<think>\nWell.\n</think>\n\nYes.")
    plain: Any = Template(tokenizer=tokenizer).encode(row)
    for scale in ("RoleLossScale", "ReasoningLossScale"):
        scaled: Any = Template(tokenizer=tokenizer, loss_scale=scale).encode(row)
        assert scaled["input_ids"] == plain["input_ids"]
        trained = [label for label, weight in zip(plain["labels"], scaled["loss_scale"], strict=True) if weight == 1]
        assert [label for label in scaled["labels"] if label != -100] == trained
        assert tokenizer.decode(trained).count("Yes.") == 1
        assert ("Well." in tokenizer.decode(trained)) <= (scale == "RoleLossScale")
        if scale == "RoleLossScale":
            assert scaled["labels"] == plain["labels"]

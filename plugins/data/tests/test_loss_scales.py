"""The loss scales of the house, and what their weights do to a loss and its gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, EncodeError
from twinkle.loss_scale import (
    LastRoundLossScale,
    LossScale,
    MessageWeightLossScale,
    PatternLossScale,
    ReasoningLossScale,
    RoleLossScale,
    TurnLossScale,
)
from twinkle.model import TransformersModel
from twinkle.template import Template
from twinkle.testing import tiny_model, tiny_tokenizer

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TALK = "suauata"


def talk(letters: str = TALK) -> list[Any]:
    return [{"role": ROLES[letter], "content": f"{letter}{place}"} for place, letter in enumerate(letters)]


def texts(scale: LossScale, messages: list[Any]) -> dict[str, float]:
    """Return the weight of each trained text of an encoded conversation."""
    template = Template(tokenizer=tiny_tokenizer(), loss_scale=scale)
    feature: Any = template.encode({"messages": messages})
    found: dict[str, float] = {}
    last, text = 0.0, ""
    for label, weight in [*zip(feature["labels"], feature["loss_scale"], strict=True), (-100, 0.0)]:
        if text and weight != last:
            found[text] = last
            text = ""
        text += template.decode([label]) if label != -100 else ""
        last = weight
    return found


def test_roles_have_weights() -> None:
    assert RoleLossScale()(talk()) == [0, 0, 1, 0, 1, 0, 1]
    assert RoleLossScale({"assistant": 1, "user": 0.5, "tool": 2})(talk()) == [0, 0.5, 1, 0.5, 1, 2, 1]
    assert RoleLossScale({})(talk()) == [0] * 7


@pytest.mark.parametrize(
    ("letters", "weights"),
    [("suauata", "0000101"), ("ua", "01"), ("aa", "11"), ("u", "0"), ("uau", "000"), ("uaata", "01101")],
)
def test_the_last_round_begins_at_the_last_user_message(letters: str, weights: str) -> None:
    assert LastRoundLossScale()(talk(letters)) == [float(weight) for weight in weights]
    earlier = LastRoundLossScale(earlier=0.25)(talk(letters))
    assert [weight for weight, letter in zip(earlier, letters, strict=True) if letter == "a"] == [
        1.0 if weight == "1" else 0.25 for weight, letter in zip(weights, letters, strict=True) if letter == "a"
    ]


@pytest.mark.parametrize(
    ("weights", "rest", "found"),
    [
        ({0: 2}, 0, [2, 0, 0]),
        ({-1: 2}, 1, [1, 1, 2]),
        ({1: 0.5, 5: 9, -5: 9}, 0, [0, 0.5, 0]),
        ({2: 1, -1: 3}, 0, [0, 0, 3]),
        ({-1: 3, 2: 1}, 0, [0, 0, 1]),
        ({}, 0.5, [0.5, 0.5, 0.5]),
    ],
)
def test_turns_are_counted_from_both_ends(weights: dict[int, float], rest: float, found: list[float]) -> None:
    scaled = TurnLossScale(weights, rest)(talk())
    assert [scaled[place] for place in (2, 4, 6)] == found
    assert [scaled[place] for place in (0, 1, 3, 5)] == [0] * 4


def test_messages_bring_their_own_weights() -> None:
    messages = talk("uauaua")
    messages[1]["weight"] = 0.5
    messages[3]["weight"] = 0
    assert texts(MessageWeightLossScale(), messages) == {"a1<|im_end|>": 0.5, "a5<|im_end|>": 1.0}
    assert texts(MessageWeightLossScale(default=0), messages) == {"a1<|im_end|>": 0.5}
    assert texts(RoleLossScale({"assistant": 4}), messages) == {"a1<|im_end|>": 2.0, "a5<|im_end|>": 4.0}


@pytest.mark.parametrize("inline", [True, False])
def test_thoughts_and_answers_have_weights(inline: bool) -> None:
    said = {"content": "<think>\nhm\n</think>\n\nyes"} if inline else {"content": "yes", "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", **said}]
    assert texts(ReasoningLossScale(), messages) == {"\n</think>\n\nyes<|im_end|>": 1.0}
    assert texts(ReasoningLossScale(0.5, 2), messages) == {"<think>\nhm": 0.5, "\n</think>\n\nyes<|im_end|>": 2.0}
    assert texts(ReasoningLossScale(0.5, 2), talk("ua")) == {"a1<|im_end|>": 2.0}


def test_matches_of_patterns_have_weights() -> None:
    messages = [{"role": "user", "content": "Action"}, {"role": "assistant", "content": "Thought: x\nAction: look\n"}]
    found = texts(PatternLossScale({r"Action:.*": 2.0, r"Thought:": 0.0}), messages)
    assert found == {" x\n": 1.0, "Action: look": 2.0, "\n<|im_end|>": 1.0}
    assert texts(PatternLossScale({"never": 2.0}, rest=0.5), messages) == {"Thought: x\nAction: look\n<|im_end|>": 0.5}


def test_of_overlapping_matches_the_earlier_counts() -> None:
    def pieces(patterns: dict[str, float]) -> Any:
        return PatternLossScale(patterns)([{"role": "assistant", "content": "abcd"}])[0]

    assert [piece for piece in pieces({"bc": 2, "abc": 3}) if piece[0]] == [("abc", 3), ("d", 1)]
    assert [piece for piece in pieces({"a": 2, "ab": 3, "x*": 9}) if piece[0]] == [("a", 2), ("bcd", 1)]
    assert pieces({"d$": 2})[-2:] == [("d", 2), ("", 1)]


def test_words_that_a_tool_call_repeats_are_weighted_where_they_are_said() -> None:
    scale = PatternLossScale({"look": 2.0})
    chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "I look", "tool_calls": [call]}]
    feature: Any = Template(tokenizer=tiny_tokenizer(chat_template), loss_scale=scale).encode({"messages": messages})
    weights = [weight for weight in feature["loss_scale"] if weight]
    assert weights == [1.0] * 2 + [2.0] * 4 + [1.0] * len("[look]") + [1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoleLossScale({"asistant": 1}), "weights has 'asistant'; a role is one of system, user"),
        (lambda: RoleLossScale({"user": -1}), "the weight of 'user' is -1; a weight is a finite number from 0"),
        (lambda: LastRoundLossScale(True), "earlier is True"),
        (lambda: TurnLossScale({"0": 1}), "weights has '0'; give numbers of turns: 0 first, -1 last"),
        (lambda: TurnLossScale({0: float("inf")}), "the weight of turn 0 is inf"),
        (lambda: TurnLossScale({}, rest=-1), "rest is -1"),
        (lambda: MessageWeightLossScale("1"), "default is '1'"),
        (lambda: ReasoningLossScale(answer=None), "answer is None"),
        (lambda: PatternLossScale({"(": 1}), r"'\(' is not a regular expression: missing \)"),
        (lambda: PatternLossScale("a"), "patterns is 'a'; give a dict of expressions and weights"),
        (lambda: PatternLossScale({}), "patterns is {}"),
        (
            lambda: registry().build("RoleLossScale", "loss_scale", weight={}),
            "unknown argument 'weight', nearest: 'weights'",
        ),
    ],
)
def test_arguments_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_user_turn_that_asks_is_refused_where_its_role_has_no_weight() -> None:
    messages = talk("ua")
    messages[0]["weight"] = 1
    with pytest.raises(EncodeError, match=r"message 0 \(user\) requests training .* RoleLossScale gives it weight 0"):
        texts(RoleLossScale(), messages)


# What the weights do


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def reference(model: Any, rows: list[Any]) -> torch.Tensor:
    """Return sum of weight * -log p over the number of labels, in float64, position by position."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        logits = model(torch.tensor([row["input_ids"]])).logits[0].double()
        for place, label in enumerate(row["labels"]):
            if label != -100:
                total = total - row["loss_scale"][place] * torch.log_softmax(logits[place], -1)[label]
                count += 1
    return total / count


@pytest.mark.parametrize("micro", [None, 1])
def test_the_loss_is_the_weighted_sum_over_the_number_of_labels(folder: str, micro: int | None) -> None:
    data = Dataset(DatasetMeta(data=[{"messages": talk("uaua")}, {"messages": talk("sua")}]))
    data.set_template("Template", model_id=folder, loss_scale=TurnLossScale({0: 0.5, -1: 2.0}))
    data.encode()
    rows = list(data)
    model = TransformersModel(model_id=folder, mixed_precision="no")
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    expected = reference(model.model, rows)
    wanted = torch.autograd.grad(expected, [p for p in model.model.parameters() if p.requires_grad])
    before = [p.detach().clone() for p in model.model.parameters() if p.requires_grad]
    model.forward_backward(inputs=rows, micro_batch_size=micro)
    model.clip_grad_and_step(max_grad_norm=0)
    assert float(model.calculate_metric(is_training=True)["loss"]) == pytest.approx(expected.item(), rel=1e-5)
    after = [p.detach() for p in model.model.parameters() if p.requires_grad]
    for old, new, grad in zip(before, after, wanted, strict=True):
        assert torch.allclose(old - new, grad.float(), rtol=1e-3, atol=1e-6)

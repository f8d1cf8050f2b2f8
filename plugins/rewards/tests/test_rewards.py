"""Rewards that look at text: what counts as right, as well formed, and as an attempt to cheat."""

import json
import time
from typing import Any

import pytest

from twinkle.errors import ArgumentError, DataError
from twinkle_rewards.countdown import CountdownReward
from twinkle_rewards.exact import ExactMatchReward, GSM8KAccuracyReward, MultiModalAccuracyReward
from twinkle_rewards.formats import CoTReward, FormatReward, GSM8KFormatReward
from twinkle_rewards.olympiad import OlympiadBenchFormatReward, OlympiadBenchQualityReward
from twinkle_rewards.overlap import F1Reward, ToolExploreReward


def row(said: Any, truth: Any = "", **message: Any) -> Any:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said, **message}]
    return {"messages": turns, "user_data": [("ground_truth", json.dumps(truth))]}


def score(reward: Any, said: Any, truth: Any = "", **message: Any) -> float:
    (found,) = reward([row(said, truth, **message)])
    return float(found)


@pytest.mark.parametrize(
    ("take", "said", "truth", "expected"),
    [
        ("all", "68", "68", 1),
        ("all", " 68.\n", 68, 1),
        ("all", "68.0", "68", 1),
        ("all", "1,068", "1068", 1),
        ("all", "$68$", "68", 1),
        ("all", "\u2212 5", "-5", 0),
        ("all", "\u22125", "-5", 1),
        ("all", "68.0000001", "68", 0),
        ("all", "068", "68", 1),
        ("all", "6 8", "68", 0),
        ("all", "٦٨", "68", 0),
        ("all", "６８", "68", 0),
        ("all", "It is 68", "68", 0),
        ("all", "1e2", "100", 0),
        ("all", "", "0", 0),
        ("all", "The  Red\nfox.", "the red fox", 1),
        ("all", "blue", ["red", "blue"], 1),
        ("all", "True", True, 1),
        ("last_number", "20 + 48 = 68.", "68", 1),
        ("last_number", "68, or 67", "68", 0),
        ("last_number", "none", "68", 0),
        ("last_number", "68" + " and so on" * 300, "68", 1),
        ("last_number", "1234567" + "x" * 1998, "67", 0),
        ("last_number", "the change is -$68", "-68", 1),
        ("last_number", "the change is -$68", "68", 0),
        ("last_number", "$70-$68", "68", 1),
        ("last_line", "thinking\n68\n", "68", 1),
        ("last_line", "68\nno", "68", 0),
        ("box", "\\boxed{68} then \\boxed{ 68 }", "68", 1),
        ("box", "\\boxed{68} then \\boxed{67", "68", 0),
        ("box", "68", "68", 0),
        ("tag", "<answer>1</answer><answer>68</answer>", "68", 1),
        ("tag", "</answer>68<answer>", "68", 0),
    ],
)
def test_exactly_the_answer(take: Any, said: str, truth: Any, expected: float) -> None:
    assert score(ExactMatchReward(take), said, truth) == expected


@pytest.mark.parametrize(
    ("said", "truth", "expected"),
    [
        ("so\n#### 72", "72", 1),
        ("#### 1,272 apples", "1272", 1),
        ("\\boxed{\\$1{,}272}", "1272", 1),
        ("\\boxed{72\\text{ eggs}}", "72", 1),
        ("#### 72.00", 72, 1),
        ("#### 71\n#### 72", "72", 1),
        ("#### 71 \\boxed{72}", "72", 1),
        ("\\boxed{72} #### 71", "72", 0),
        ("#### 71 72", "72", 0),
        ("\\boxed{72 or 71}", "72", 0),
        ("\\boxed{\\frac{144}{2}}", "72", 0),
        ("72", "72", 0),
        ("####\n72", "72", 0),
        ("#### -5", "-5", 1),
        ("#### -$5", "-5", 1),
        ("#### -$5", "5", 0),
        ("\\boxed{-\\$1,200}", "-1200", 1),
        ("\\boxed{x = - 5}", "-5", 1),
        ("\\boxed{- 5}", "5", 0),
        ("#### total - 5", "5", 1),
        ("#### 72", "reasoning #### 72", 1),
        ("#### Blue", "blue", 1),
    ],
)
def test_gsm8k_takes_the_last_number_that_is_marked(said: str, truth: Any, expected: float) -> None:
    assert score(GSM8KAccuracyReward(), said, truth) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [("#### 72", 1), ("\\boxed{72}", 1), ("\\boxed{x}", 0), ("\\boxed{72", 0), ("####", 0), ("72", 0), ("", 0)],
)
def test_gsm8k_form_is_a_marked_number(said: str, expected: float) -> None:
    assert score(GSM8KFormatReward(), said) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\nb</think>\n\n<answer>\nc\n</answer>\n", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> or c", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think><think>a</think></think><answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("a</think><answer>b</answer>", 0),
        ("<think><answer>b</answer></think>", 0),
        ("", 0),
    ],
)
def test_thought_and_answer_in_their_tags_and_nothing_else(said: str, expected: float) -> None:
    assert score(FormatReward(), said) == expected


@pytest.mark.parametrize(
    "reward",
    [FormatReward(), CoTReward(), GSM8KFormatReward(), OlympiadBenchFormatReward(), OlympiadBenchQualityReward()],
)
def test_rewards_of_the_form_alone_may_be_called_as_those_of_the_answer(reward: Any) -> None:
    rows = [row("<think>a</think><answer>b</answer>"), row("#### 72")]
    assert reward(rows, ["b", "72"]) == reward(rows, ground_truths=rows) == reward(rows)


def test_a_thought_may_begin_in_the_prompt_or_stand_apart() -> None:
    assert score(FormatReward(think_in_prompt=True), "a</think><answer>b</answer>") == 1
    assert score(FormatReward(think_in_prompt=True), "</think><answer>b</answer>") == 0
    assert score(FormatReward(), "<answer>b</answer>", reasoning_content="a") == 1
    assert score(CoTReward(), "b", reasoning_content="a") == 1
    assert [score(CoTReward(min_chars=3), f"<think>{thought}</think>b") for thought in ("ab", "abc")] == [0, 1]


def test_the_answer_is_the_last_turn_of_the_assistant_in_text_or_parts() -> None:
    parts = [{"type": "text", "text": "<answer>3"}, {"type": "image"}, {"type": "text", "text": ".0</answer>"}]
    assert score(MultiModalAccuracyReward(), parts, "<answer> 3 </answer>") == 1
    unanswered = [
        {"messages": [], "user_data": {"ground_truth": "3"}},
        {"user_data": {"ground_truth": "3"}},
        {
            "messages": [{"role": "assistant", "content": "3"}, {"role": "tool", "content": "3"}],
            "user_data": {"ground_truth": 3},
        },
        row(None, "3"),
    ]
    assert ExactMatchReward()(unanswered) == [0.0] * 4


def test_the_truth_may_be_given_beside_as_value_or_trajectory() -> None:
    rows: Any = [{"messages": [{"role": "assistant", "content": "3"}]}] * 4
    truths = [3, "4", {"user_data": [("ground_truth", "3")]}, {"messages": [{"role": "assistant", "content": "3"}]}]
    assert ExactMatchReward()(rows, truths) == [1.0, 0.0, 1.0, 1.0]
    assert ExactMatchReward()(rows, ground_truths=truths) == [1.0, 0.0, 1.0, 1.0]
    with pytest.raises(ArgumentError, match="ground_truths has 3 entries, there are 4 rows"):
        ExactMatchReward()(rows, ground_truths=truths[:3])
    with pytest.raises(DataError, match="row 1 has no 'ground_truth' in its user_data"):
        GSM8KAccuracyReward()([row("#### 3", "3"), *rows])
    with pytest.raises(DataError, match="row 1 has no 'ground_truth' in its user_data"):
        F1Reward()([row("3", ["3"]), row("3", [])])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("(25 - 5) * 4 + 3", 1),
        ("3 + 4 × (25 − 5) = 83", 1),
        ("3 + 4 * (25 - 5) = 84", 0),
        ("83", 0),
        ("25 * 4 - 5 * 3", 0),
        ("25 * 3 + 4 + 5 - 1", 0),
        ("4 * (25 - 5) + 3 + 0", 0),
        ("25 / (5 - 5) + 3 + 4", 0),
        ("-(5 - 25) * 4 + 3", 0),
        ("9**9**9**9", 0),
        ("(" * 250 + "3" + ")" * 250, 0),
        ("3 + 4 * (25 - 5)\u0000", 0),
        ("３ + 4 * (25 - 5)", 0),
        ("__import__('os').abort()", 0),
        ("", 0),
    ],
)
def test_an_equation_uses_each_number_once_and_reaches_the_target(said: str, expected: float) -> None:
    game = {"messages": [{"role": "assistant", "content": f"<think>83</think><answer>{said}</answer>"}]}
    game["user_data"] = [("nums", "[3, 4, 5, 25]"), ("target", "83")]  # type: ignore[list-item]
    assert CountdownReward()([game]) == [expected]  # type: ignore[list-item]


def test_fractions_on_the_way_are_exact_and_a_right_form_may_earn_something() -> None:
    game: Any = {"messages": [{"role": "assistant", "content": "<answer>8 / (3 - 8 / 3)</answer>"}]}
    game["user_data"] = [("nums", "[8, 3, 8, 3]"), ("target", "24")]
    assert CountdownReward()([game]) == [1.0]
    game["messages"][0]["content"] = "<answer>8 + 3 + 8 + 3</answer>"
    assert CountdownReward(format_score=0.1)([game]) == [0.1]
    with pytest.raises(DataError, match="row 0 has nums None"):
        CountdownReward()([row("1")])


@pytest.mark.parametrize(
    ("said", "truth", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1),
        ("tower tower", "eiffel tower", 0.5),
        ("in the city of Paris", "Paris", 2 / 5),
        ("巴黎铁塔", "巴黎", 2 / 3),
        ("Paris", ["London", "Paris"], 1),
        ("why <answer>Paris</answer> so", "Paris", 1),
        ("so \\boxed{Paris} it is", "Paris", 1),
        ("", "Paris", 0),
    ],
)
def test_f1_of_words(said: str, truth: Any, expected: float) -> None:
    assert score(F1Reward(), said, truth) == pytest.approx(expected)


def test_a_pattern_says_where_the_answer_stands() -> None:
    reward = F1Reward(answer_pattern=r"Answer: (.*)")
    said = ["Answer: Rome\nAnswer: Paris\nBye", "Answer: Paris\nAnswer: Rome", "Paris"]
    assert [score(reward, one, "Paris") for one in said] == [1.0, 0.0, 0.0]


def test_looking_things_up_pays_where_it_led_to_the_answer() -> None:
    def asked(*queries: str, said: str) -> Any:
        calls = [{"function": {"name": "search", "arguments": {"q": query}}} for query in queries]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return {"messages": [turn, *row(said)["messages"]], "user_data": {"ground_truth": "Paris"}}

    rows = [asked("a", "b", said="Paris"), asked("a", "a", said="Paris"), asked("a", said="Rome"), asked(said="Paris")]
    assert ToolExploreReward()(rows) == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("so \\boxed{2}", 1),
        ("so \\boxed{\\{2\\}}.", 1),
        ("so $x \\boxed{2}", 0.5),
        ("so {{ \\boxed{2}", 0.5),
        ("\\boxed{2}" + "x" * 300, 0.5),
        ("\\boxed{ }", 0),
        ("\\boxed{2", 0),
    ],
)
def test_an_olympiad_answer_is_boxed_in_sound_latex(said: str, expected: float) -> None:
    assert score(OlympiadBenchFormatReward(), said) == expected


def test_quality_falls_with_circles_and_with_length() -> None:
    reward = OlympiadBenchQualityReward(steps=2, min_chars=40, max_chars=200)
    good = "First we see that a + b = 7 holds here.\nTherefore twice that sum has to be 14 in the end."
    circles = "a = b so a = b " * 12
    assert score(reward, good) == pytest.approx(1.0)
    assert score(reward, circles) < 0.75
    assert score(reward, good + "\n" + "padding " * 60) < 0.9
    assert score(reward, "7") < 0.05
    assert score(reward, "") == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExactMatchReward("first"),  # type: ignore[arg-type]
        lambda: ExactMatchReward(ground_truth_key=""),
        lambda: FormatReward(think_in_prompt=1),  # type: ignore[arg-type]
        lambda: CoTReward(min_chars=0),
        lambda: CountdownReward(format_score=2),
        lambda: F1Reward(answer_pattern="("),
        lambda: F1Reward(answer_pattern="no group"),
        lambda: ToolExploreReward(f1_threshold=0),
        lambda: OlympiadBenchQualityReward(min_chars=10, max_chars=5),
        lambda: OlympiadBenchQualityReward(steps=0),
    ],
)
def test_options_outside_their_range_are_refused(make: Any) -> None:
    with pytest.raises(ArgumentError):
        make()


def long_texts(size: int) -> list[str]:
    """Return texts of about that many characters which make careless patterns and parsers take very long."""
    units = [
        "\\boxed{",
        "\\boxed{" + "{",
        "<answer>",
        "<answer>a</answer>",
        "#### ",
        "1,",
        "1,234",
        "(",
        "\\",
        "= ",
        "\n",
        "漢",
    ]
    whole = ["\\boxed{" + "{}" * (size // 2) + "}", "#### " + "9" * size, "<answer>" + "(" * size + "</answer>"]
    return [unit * (size // len(unit)) for unit in units] + whole


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [100_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "reward",
    [
        *(ExactMatchReward(take) for take in ("all", "last_line", "last_number", "box", "tag")),  # type: ignore[arg-type]
        *(GSM8KAccuracyReward(), GSM8KFormatReward(), MultiModalAccuracyReward(), FormatReward(), CoTReward()),
        *(OlympiadBenchFormatReward(), OlympiadBenchQualityReward(), F1Reward(), ToolExploreReward()),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_long_hostile_text_is_read_in_time_linear_in_its_length(reward: Any, size: int) -> None:
    began = time.process_time()
    assert all(0 <= score(reward, text, "7") <= 1 for text in long_texts(size))
    assert time.process_time() - began < 20  # about one second; what is quadratic needs minutes at least at 1 MB

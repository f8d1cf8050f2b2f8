"""Piped output is plain lines; a terminal gets a live display with the same numbers."""

import io

import pytest
from rich.console import Console

from twinkle_recipes.display import LiveDisplay, PlainDisplay, Silent, display

ANSWERS = [("Who are\nyou?", "a [bold]model", "Glow")]


def run_through(terminal: bool, log_every: int = 1) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80)
    show = display(log_every, console)
    assert isinstance(show, LiveDisplay if terminal else PlainDisplay)
    show.say("hello [red]there")
    with show:
        show.begin(1, 10)
        for step in range(1, 11):
            evaluated = {"eval/loss": 1.25} if step == 5 else {}
            show.step(step, {"loss": 3.0 / step, "learning_rate": 2e-4, "tokens_per_second": 512.3, **evaluated})
    show.answers(ANSWERS)
    return stream.getvalue()


def test_piped_output_is_plain_lines() -> None:
    text = run_through(terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "hello [red]there"
    assert lines[1].startswith("step 1/10 loss=3.0000 learning_rate=2.00e-04 tokens_per_second=512 eta=")
    assert len([line for line in lines if line.startswith("step ")]) == 10
    assert lines[-3:] == ["question: Who are you?", "  before: a [bold]model", "  after:  Glow"]


def test_log_every_thins_the_lines_but_keeps_first_last_and_evaluations() -> None:
    lines = [line for line in run_through(terminal=False, log_every=4).splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == [1, 4, 5, 8, 10]
    assert "eval/loss=1.2500" in lines[2]


def test_a_terminal_shows_bar_chart_and_table() -> None:
    text = run_through(terminal=True)
    assert "\x1b" in text
    assert "10/10" in text
    assert "loss: 3.000 → 0.300" in text
    assert "█" in text
    assert "a [bold]model" in text
    assert "hello [red]there" in text


def test_a_long_line_can_be_copied_whole_from_a_terminal() -> None:
    stream = io.StringIO()
    command = "continue with: " + "twinkle run sft --resume_from " + "x" * 100
    display(console=Console(file=stream, force_terminal=True, width=80)).say(command)
    assert command in stream.getvalue()


def test_a_note_stands_below_the_display_while_it_lasts() -> None:
    stream = io.StringIO()
    show = display(console=Console(file=stream, force_terminal=True, width=80))
    show.note("heard before")
    assert stream.getvalue().startswith("heard before")
    with show:
        show.begin(1, 2)
        show.step(1, {"loss": 1.0})
        show.note("heard while it lasts")
        show.step(2, {"loss": 0.5})
    assert stream.getvalue().rpartition("2/2")[2].count("heard while it lasts") == 1


def test_a_rank_that_is_not_the_first_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Silent() as show:
        show.begin(1, 2)
        show.step(1, {"loss": 1.0})
        show.say("x")
        show.note("y")
        show.answers(ANSWERS)
    assert capsys.readouterr() == ("", "")


def test_a_step_that_left_something_out_says_so() -> None:
    stream = io.StringIO()
    show = display(1, Console(file=stream, width=80))
    show.begin(1, 2)
    show.step(1, {"loss": float("nan"), "nonfinite_skipped": 1, "grad_norm": 0.0})
    assert stream.getvalue().startswith("step 1/2 loss=nan nonfinite_skipped=1 grad_norm=0.0000 ")


def policy_run(terminal: bool) -> str:
    stream = io.StringIO()
    columns = {"reward": "reward", "kl": "KL", "absent": "absent"}
    show = display(1, Console(file=stream, force_terminal=terminal, width=80), columns, charted="reward")
    with show:
        show.begin(1, 2)
        show.step(1, {"loss": 9.0, "reward": -0.5, "kl": 0.25})
        show.table("answers of step 1", ("prompt", "reward"), [("2 +\n[bold]2", "1.00")])
        show.step(2, {"loss": 9.0, "reward": 0.75, "kl": 0.5})
    return stream.getvalue()


def test_a_recipe_chooses_the_numbers_that_are_shown_and_the_one_that_is_drawn() -> None:
    first, *table, second = policy_run(terminal=False).splitlines()
    assert first.startswith("step 1/2 reward=-0.5000 kl=0.2500 eta=")
    assert table == ["answers of step 1", "  prompt=2 + [bold]2 | reward=1.00"]
    assert second.startswith("step 2/2 reward=0.7500 kl=0.5000 eta=")
    text = policy_run(terminal=True)
    assert "reward: -0.500 → 0.750, highest 0.750" in text
    assert "[bold]2" in text
    assert "loss" not in text


def test_a_rank_that_is_not_the_first_shows_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    Silent().table("answers", ("prompt",), [("2 + 2",)])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_what_a_model_says_does_not_steer_the_terminal(terminal: bool) -> None:
    stream = io.StringIO()
    show = display(console=Console(file=stream, force_terminal=terminal, width=80))
    said = "a\x1b[2Jb\x07c\x9bd"
    show.table("answers", ("prompt", "answer"), [("q", said)])
    show.answers([("q", said, said)])
    text = stream.getvalue()
    assert text.count("a␛[2Jb␇c\ufffdd") == 3
    assert not {"\x07", "\x9b"} & set(text)

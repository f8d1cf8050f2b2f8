"""The loss curve shows the numbers that were logged, and the terminal chart their shape."""

import json
import math
from pathlib import Path

import pytest

from twinkle_recipes.display import chart
from twinkle_recipes.history import Curve, History, figure_of, loss_figure, smoothed, write_curve, write_loss_curve


def history(steps: int) -> History:
    result = History()
    for step in range(1, steps + 1):
        evaluated = {"eval/loss": 2.0 / step} if step % 5 == 0 else {}
        result.add(step, {"loss": 3.0 / step, **evaluated})
    return result


def test_the_curve_has_a_point_for_each_step_and_each_evaluation() -> None:
    axes = loss_figure(history(20), "run").axes[0]
    raw, smooth, evaluation = axes.get_lines()
    assert list(raw.get_xdata()) == list(range(1, 21))
    assert list(raw.get_ydata()) == [3.0 / step for step in range(1, 21)]
    assert len(smooth.get_xdata()) == 20
    assert list(evaluation.get_xdata()) == [5, 10, 15, 20]
    assert axes.get_xlabel() == "optimizer step"
    assert all(place == int(place) for place in axes.get_xticks())
    assert "loss" in axes.get_ylabel()


def test_a_png_is_written(tmp_path: Path) -> None:
    path = write_loss_curve(history(3), tmp_path / "loss.png", "run")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [item.name for item in tmp_path.iterdir()] == ["loss.png"]


def test_without_a_step_there_is_no_picture(tmp_path: Path) -> None:
    nothing = History()
    nothing.add(1, {"loss": math.nan})
    assert write_loss_curve(nothing, tmp_path / "loss.png", "run") is None
    assert list(tmp_path.iterdir()) == []


def test_smoothing_keeps_a_constant_and_forgets_the_past() -> None:
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smoothed([1.0, 5.0, 3.0], weight=0) == [1.0, 5.0, 3.0]
    # Weights 0.9 and 1 of the two values, times 0.1, over their sum.
    assert smoothed([1.0, 2.0], weight=0.9)[1] == pytest.approx((0.9 * 1.0 + 2.0) / 1.9)


def test_history_is_read_back_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "loss": float(n)}) + "\n" for n in range(1, 6)) + '{"step": 6, "l')
    assert History.read(path, 3).series("loss") == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert History.read(tmp_path / "absent", 3).steps == []
    path.write_text('{"step": 0, "eval/reward": 0.25}\n{"step": 1, "loss": 1.0}\n{"loss": 3.0}\n')
    assert [step for step, _ in History.read(path, 3).steps] == [0, 1]


def test_the_chart_is_as_high_as_its_highest_value() -> None:
    assert chart([8.0, 4.0, 0.0], width=10, height=2) == ["█  ", "██ "]
    assert chart([1.0, 0.5], height=1) == ["█▄"]
    assert chart([]) == []
    assert chart([0.0, 0.0], height=1) == ["  "]
    assert chart([-8.0, -4.0, 0.0], width=10, height=2) == ["  █", " ██"]


def test_a_long_series_is_averaged_into_the_columns() -> None:
    assert chart([2.0, 2.0, 1.0, 1.0], width=2, height=1) == ["█▄"]
    assert all(len(row) == 60 for row in chart([float(n) for n in range(1000)], width=60))


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert write_loss_curve(history(3), tmp_path / "absent" / "loss.png", "run") is None
    assert "no loss curve" in caplog.text


def test_a_picture_may_have_several_lines_and_those_without_numbers_are_left_out(tmp_path: Path) -> None:
    told = History()
    for step in range(1, 5):
        told.add(step, {"kl": 0.1 * step, "approx_kl": -0.01, **({"eval/reward": 0.5} if step == 4 else {})})
    curve = Curve({"kl": "reference", "absent": "nothing", "approx_kl": "sampler"}, "nats", {"eval/reward": "greedy"})
    axes = figure_of(told, curve, "run").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == [
        "reference, each step", "reference, smoothed", "sampler, each step", "sampler, smoothed", "greedy",
    ]  # fmt: skip
    assert list(axes.get_lines()[4].get_xdata()) == [4]
    assert axes.get_ylabel() == "nats"
    assert axes.get_ylim()[0] < 0
    assert write_curve(told, curve, tmp_path / "kl.png", "run") == tmp_path / "kl.png"
    assert write_curve(told, Curve({"absent": "x"}, "y"), tmp_path / "none.png", "run") is None
    assert [path.name for path in tmp_path.iterdir()] == ["kl.png"]

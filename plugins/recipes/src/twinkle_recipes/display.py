"""Output during a run: a live display on a terminal, plain lines otherwise."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_BLOCKS = " ▁▂▃▄▅▆▇█"


def chart(values: Sequence[float], width: int = 60, height: int = 6) -> list[str]:
    """Return `height` lines of at most `width` columns that show `values` as bars.

    Bars start at 0, or at the lowest value if one is negative; the highest value fills all lines.

    More values than columns are averaged in equal parts, so that the last column is always the newest.
    """
    if not values or width < 1 or height < 1:
        return []
    columns = _squeezed(values, width)
    ground = min(0.0, *columns)
    top = max(columns) - ground
    eighths = [round(8 * height * (value - ground) / top) if top > 0 else 0 for value in columns]
    return ["".join(_BLOCKS[min(8, max(0, bar - 8 * row))] for bar in eighths) for row in reversed(range(height))]


def _squeezed(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * column // width for column in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


Answer = tuple[str, str, str]
"""A question, the answer before training and the one after."""

Columns = Mapping[str, str]
"""The numbers of a step that are shown, in order, each with its label."""

SFT_COLUMNS: Columns = {
    "loss": "loss",
    "nonfinite_skipped": "skipped",
    "eval/loss": "eval loss",
    "accuracy": "accuracy",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "tokens_per_second": "tokens/s",
}


_SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {code: 0xFFFD for code in range(0x7F, 0xA0)}
"""Replacements for control characters."""


class Display(Protocol):
    """The terminal output of a recipe."""

    def __enter__(self) -> "Display":
        """Start the display."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the display; its last state stays on the screen."""

    def say(self, text: str) -> None:
        """Show one line."""

    def note(self, text: str) -> None:
        """Show one line from a signal handler, which may have interrupted other output."""

    def begin(self, first_step: int, total_steps: int) -> None:
        """Set the number of steps; those before `first_step` are done."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a step."""

    def answers(self, answers: Sequence[Answer]) -> None:
        """Show the model's answers before and after training."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show rows of text under a title, such as some of the completions of a step."""


def display(
    log_every: int = 1, console: Console | None = None, columns: Columns = SFT_COLUMNS, charted: str = "loss"
) -> Display:
    """Return the display that fits standard output: live on a terminal, plain lines when piped.

    Args:
        log_every: steps between plain lines.
        console: output; by default standard output.
        columns: the numbers of a step that are shown.
        charted: the number that a terminal shows as a chart.
    """
    console = console or Console()
    if console.is_terminal:
        return LiveDisplay(console, columns, charted)
    return PlainDisplay(console, log_every, columns)


class Silent:
    """Shows nothing; used by all ranks except the first."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def begin(self, first_step: int, total_steps: int) -> None:
        """Show nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show nothing."""

    def answers(self, answers: Sequence[Answer]) -> None:
        """Show nothing."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show nothing."""


class PlainDisplay:
    """One line for each `log_every` steps, without control characters.

    Args:
        console: output.
        log_every: steps between lines; the first, the last and every evaluated step are always shown.
        columns: the numbers in a line.
    """

    def __init__(self, console: Console, log_every: int = 1, columns: Columns = SFT_COLUMNS) -> None:
        self._console = console
        self._columns = columns
        self._log_every = log_every
        self._first = 1
        self._total = 0
        self._started = time.monotonic()

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Write one line."""
        self._console.out(text, highlight=False)

    def note(self, text: str) -> None:
        """Write one line."""
        self.say(text)

    def begin(self, first_step: int, total_steps: int) -> None:
        """Remember the number of steps."""
        self._first, self._total = first_step, total_steps
        self._started = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a step, if it is due."""
        edge = step in (self._first, self._total) or any(name.startswith("eval/") for name in metrics)
        if edge or step % self._log_every == 0:
            remaining = (time.monotonic() - self._started) / (step - self._first + 1) * (self._total - step)
            numbers = " ".join(f"{name}={_number(name, metrics[name])}" for name in self._columns if name in metrics)
            self.say(f"step {step}/{self._total} {numbers} eta={remaining:.0f}s")

    def answers(self, answers: Sequence[Answer]) -> None:
        """Write each question and its two answers on separate lines."""
        for question, before, after in answers:
            self.say(f"question: {_one_line(question)}")
            self.say(f"  before: {_one_line(before)}")
            self.say(f"  after:  {_one_line(after)}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write the title, then each row in one line."""
        self.say(title)
        for row in rows:
            cells = (f"{name}={_one_line(cell)}" for name, cell in zip(columns, row, strict=True))
            self.say("  " + " | ".join(cells))


class LiveDisplay:
    """A progress bar, the numbers of the newest step and one of them as a chart, redrawn in place.

    Args:
        console: a terminal.
        columns: the numbers that are shown.
        charted: the number shown as a chart.
    """

    def __init__(self, console: Console, columns: Columns = SFT_COLUMNS, charted: str = "loss") -> None:
        self._console = console
        self._columns, self._charted = columns, charted
        self._chartable: list[float] = []
        self._numbers: dict[str, float] = {}
        self._note = ""
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=None)
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __rich__(self) -> Group:
        """Return the current content of the screen."""
        note = [Text(self._note, style="bold")] if self._note else []
        return Group(self._bar, _numbers_line(self._numbers, self._columns), *self._chart(), *note)

    def say(self, text: str) -> None:
        """Show one line above the display; long lines are wrapped by the terminal, so that they can be copied."""
        self._console.print(Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        """Show one line below the display at its next refresh, or immediately if it is not active."""
        self._note = text
        if not self._live.is_started:
            self.say(text)

    def begin(self, first_step: int, total_steps: int) -> None:
        """Set the length of the bar."""
        self._bar.reset(self._task, total=total_steps, completed=first_step - 1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar and add to the chart."""
        self._numbers |= {name: metrics[name] for name in self._columns if name in metrics}
        if isinstance(number := metrics.get(self._charted), int | float) and math.isfinite(number):
            self._chartable.append(float(number))
        self._bar.update(self._task, completed=step)

    def answers(self, answers: Sequence[Answer]) -> None:
        """Show a table of questions and answers."""
        table = Table("question", "before", "after", show_lines=True, expand=True)
        for row in answers:
            table.add_row(*(Text(_printable(cell)) for cell in row))
        self._console.print(table)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table above the display."""
        table = Table(*columns, title=title, title_justify="left", show_lines=True, expand=True)
        for row in rows:
            table.add_row(*(Text(_printable(cell)) for cell in row))
        self._console.print(table)

    def _chart(self) -> list[Panel]:
        if len(self._chartable) < 2:
            return []
        width = max(10, self._console.width - 4)
        columns = min(width, max(len(self._chartable), 2))
        text = Text("\n".join(chart(self._chartable, columns)), style="cyan", no_wrap=True)
        first, last, highest = self._chartable[0], self._chartable[-1], max(self._chartable)
        title = f"{self._charted}: {first:.3f} → {last:.3f}, highest {highest:.3f}"
        return [Panel(text, title=title, title_align="left", border_style="dim")]


def _numbers_line(numbers: Mapping[str, float], labels: Columns) -> Text:
    line = Text()
    for name, value in numbers.items():
        line.append(f"{labels[name]} ", style="dim").append(f"{_number(name, value)}   ", style="bold")
    return line


def _number(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if name == "learning_rate":
        return f"{value:.2e}"
    return f"{value:.0f}" if name in ("tokens_per_second", "nonfinite_skipped") else f"{value:.4f}"


def _one_line(text: str) -> str:
    return _printable(" ".join(text.split()))


def _printable(text: str) -> str:
    """Replace control characters by symbols, so that output of a model cannot control the terminal."""
    return text.translate(_SIGNS)

"""What the user sees while a run lasts: a live display on a terminal, plain lines everywhere else."""

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

from twinkle_recipes.chart import chart

Answer = tuple[str, str, str]
"""A question, the answer before training and the one after."""

_SHOWN = {
    "loss": "loss",
    "nonfinite_skipped": "skipped",
    "eval/loss": "eval loss",
    "accuracy": "accuracy",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "tokens_per_second": "tokens/s",
}


class Display(Protocol):
    """What a recipe tells the user."""

    def __enter__(self) -> "Display":
        """Begin to show steps."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""

    def say(self, text: str) -> None:
        """Show one line."""

    def note(self, text: str) -> None:
        """Show one line from within a signal handler, where something else may be being shown."""

    def begin(self, first_step: int, total_steps: int) -> None:
        """Tell how many steps there are, and that those before `first_step` are done."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a step."""

    def answers(self, answers: Sequence[Answer]) -> None:
        """Show what the model said before and after."""


def display(log_every: int = 1, console: Console | None = None) -> Display:
    """Return the display that fits standard output: live on a terminal, plain lines when piped."""
    console = console or Console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console, log_every)


class Silent:
    """Shows nothing: what every rank but the first has."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left open."""

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


class PlainDisplay:
    """One line for each `log_every` steps, without control characters.

    Args:
        console: where to write.
        log_every: steps between lines; the first, the last and every evaluated step are always shown.
    """

    def __init__(self, console: Console, log_every: int = 1) -> None:
        self._console = console
        self._log_every = log_every
        self._first = 1
        self._total = 0
        self._started = time.monotonic()

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left open."""

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
        """Write the numbers of a step, if it is its turn."""
        edge = step in (self._first, self._total) or any(name.startswith("eval/") for name in metrics)
        if edge or step % self._log_every == 0:
            left = (time.monotonic() - self._started) / (step - self._first + 1) * (self._total - step)
            numbers = " ".join(f"{name}={_number(name, metrics[name])}" for name in _SHOWN if name in metrics)
            self.say(f"step {step}/{self._total} {numbers} eta={left:.0f}s")

    def answers(self, answers: Sequence[Answer]) -> None:
        """Write each question with its two answers on lines of their own."""
        for question, before, after in answers:
            self.say(f"question: {_one_line(question)}")
            self.say(f"  before: {_one_line(before)}")
            self.say(f"  after:  {_one_line(after)}")


class LiveDisplay:
    """A progress bar, the numbers of the newest step and the loss as a chart, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._losses: list[float] = []
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
        """Return what stands on the screen now."""
        note = [Text(self._note, style="bold")] if self._note else []
        return Group(self._bar, _numbers_line(self._numbers), *self._chart(), *note)

    def say(self, text: str) -> None:
        """Show one line above the display; a long one is left to the terminal, so that it can be copied whole."""
        self._console.print(Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        """Show one line below the display, when that is drawn next; at once where it is not shown."""
        self._note = text
        if not self._live.is_started:
            self.say(text)

    def begin(self, first_step: int, total_steps: int) -> None:
        """Set the length of the bar."""
        self._bar.reset(self._task, total=total_steps, completed=first_step - 1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar and add to the chart."""
        self._numbers |= {name: metrics[name] for name in _SHOWN if name in metrics}
        if isinstance(loss := metrics.get("loss"), int | float) and loss == loss:
            self._losses.append(float(loss))
        self._bar.update(self._task, completed=step)

    def answers(self, answers: Sequence[Answer]) -> None:
        """Show a table of questions and answers."""
        table = Table("question", "before", "after", show_lines=True, expand=True)
        for row in answers:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def _chart(self) -> list[Panel]:
        if len(self._losses) < 2:
            return []
        width = max(10, self._console.width - 4)
        columns = min(width, max(len(self._losses), 2))
        text = Text("\n".join(chart(self._losses, columns)), style="cyan", no_wrap=True)
        title = f"loss: {self._losses[0]:.3f} → {self._losses[-1]:.3f}, highest {max(self._losses):.3f}"
        return [Panel(text, title=title, title_align="left", border_style="dim")]


def _numbers_line(numbers: Mapping[str, float]) -> Text:
    line = Text()
    for name, value in numbers.items():
        line.append(f"{_SHOWN[name]} ", style="dim").append(f"{_number(name, value)}   ", style="bold")
    return line


def _number(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if name == "learning_rate":
        return f"{value:.2e}"
    return f"{value:.0f}" if name in ("tokens_per_second", "nonfinite_skipped") else f"{value:.4f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""`twinkle top`: a live view of a service in the terminal."""

import contextlib
import http.client
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import orjson

from twinkle.errors import ConfigError, TwinkleError
from twinkle_server.telemetry.status import FOLDER_TOKEN, connect, find

_SECONDS: Final = 10.0
_LARGEST: Final = 4 * 2**20
_VARIABLES: Final = ("TWINKLE_API_KEY", "TINKER_API_KEY")
_FOLDER: Final = "TWINKLE_SERVE_DATA"
_BOLD, _DIM, _RED, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
State = Mapping[str, Any]


class Unreachable(TwinkleError, ConnectionError):
    """The service does not answer."""


@click.command("top", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a local service; without --url by default $TWINKLE_SERVE_DATA.",
)
@click.option("--url", help="Address of a service, instead of --data.")
@click.option("--key", help="API key for --url; by default $TWINKLE_API_KEY or $TINKER_API_KEY.")
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Write each state as a line of JSON.")
def main(data: Path | None, url: str | None, key: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Show tenants, models, queue, throughput, latency and errors of a running service.

    In a terminal, the view is updated until `q` or Ctrl-C. If the output is not a terminal, each update is printed as
    plain lines. A user's key shows its tenant; an operator's key, and --data, show the whole service.
    """
    if data is None and url is None and (folder := os.environ.get(_FOLDER)):
        data = Path(folder)
    if (data is None) == (url is None):
        raise click.UsageError("specify either --data FOLDER or --url URL")
    with _user_errors():
        read = _local(data) if data is not None else _remote(str(url), key or _key_of_environment())
        state = read()
        if once or as_json or not sys.stdout.isatty():
            _print_states(read, state, interval, once, as_json)
        else:
            _watch(read, state, interval)


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        click.get_current_context().exit(0)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.get_current_context().exit(0)


def _key_of_environment() -> str | None:
    return next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)


def _local(data: Path) -> Callable[[], State]:
    """Return a function that asks the service of a data folder, with the token of its file."""

    def read() -> State:
        presence = find(data)
        if presence is None:
            raise ConfigError(f"no server runs on {data}; start one with `twinkle serve MODEL --data {data}`")
        return _ask(presence.url, {FOLDER_TOKEN: presence.token}, lambda: connect(presence))

    return read


def _remote(url: str, key: str | None) -> Callable[[], State]:
    headers = {"X-API-Key": key} if key else {}
    place = urlsplit(url if "://" in url else f"http://{url}")
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ConfigError(f"--url must be http://HOST:PORT or https://HOST, got {url[:200]!r}")
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    host = place.hostname
    return lambda: _ask(url, headers, lambda: kind(host, place.port, timeout=_SECONDS), place.path.rstrip("/"))


def _ask(
    url: str, headers: Mapping[str, str], connection: Callable[[], http.client.HTTPConnection], prefix: str = ""
) -> State:
    """Return the answer of `GET /twinkle/overview`.

    Args:
        url: of the service, for messages.
        headers: that give access.
        connection: makes a connection.
        prefix: of the path, which a proxy strips.

    Raises:
        ConfigError: the key was refused.
        Unreachable: the service does not answer.
    """
    try:
        with contextlib.closing(connection()) as opened:
            opened.request("GET", f"{prefix}/twinkle/overview", headers=dict(headers))
            response = opened.getresponse()
            answer = orjson.loads(response.read(_LARGEST))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(f"cannot reach the service at {url}: {error}; check that it runs") from error
    if response.status != 200 or not isinstance(answer, dict):
        detail = answer.get("detail", "") if isinstance(answer, dict) else ""
        raise ConfigError(f"the service refused the request ({response.status}): {detail}; use --key")
    return answer


def _print_states(read: Callable[[], State], state: State, interval: float, once: bool, as_json: bool) -> None:
    while True:
        text = orjson.dumps(state).decode() if as_json else "\n".join([*lines_of(state), ""])
        click.echo(text)
        if once:
            return
        time.sleep(interval)
        state = read()


def _watch(read: Callable[[], State], state: State, interval: float) -> None:
    """Update the view until `q`; a service that restarts is shown as such."""
    problem: str | None = None
    with _screen() as pressed:
        while True:
            width, height = shutil.get_terminal_size()
            sys.stdout.write(frame(lines_of(state, color=True), width, height, problem))
            sys.stdout.flush()
            if pressed(interval) in ("q", "Q"):
                return
            try:
                state, problem = read(), None
            except (Unreachable, ConfigError) as error:
                problem = str(error)


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[float], str]]:
    """Use the alternate screen without echo; yield a function that waits for a key, and returns it or ""."""
    import termios
    import tty

    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if descriptor is None else termios.tcgetattr(descriptor)
    sys.stdout.write(_ENTER)
    try:
        if descriptor is not None:
            tty.setcbreak(descriptor)
        yield lambda seconds: _key(descriptor, seconds)
    finally:
        if descriptor is not None and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _key(descriptor: int | None, seconds: float) -> str:
    if descriptor is None:
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([descriptor], [], [], seconds)
    return os.read(descriptor, 1).decode("latin-1") if ready else ""


def frame(lines: Sequence[str], width: int, height: int, problem: str | None = None) -> str:
    """Return what to write to a terminal: the screen is overwritten in one piece, so that it does not flicker."""
    shown = [*([f"{_RED}{problem}{_PLAIN}"] if problem else []), *lines][: max(1, height - 1)]
    return "\x1b[H" + "".join(f"{_cut(line, width)}{_PLAIN}\x1b[K\r\n" for line in shown) + "\x1b[J"


def _cut(line: str, width: int) -> str:
    """Return at most `width` visible characters of a line; escape sequences take no space."""
    kept, visible, place = [], 0, 0
    while place < len(line) and visible < width:
        if line[place] == "\x1b":
            end = line.find("m", place) + 1
            kept.append(line[place:end])
            place = end
        else:
            kept.append(line[place])
            visible += 1
            place += 1
    return "".join(kept)


def lines_of(state: State, color: bool = False) -> list[str]:
    """Return the view of a state as lines.

    Args:
        state: answer of `/twinkle/overview`.
        color: whether to use colors of terminals.
    """
    bold, dim, red, plain = (_BOLD, _DIM, _RED, _PLAIN) if color else ("", "", "", "")
    rates, queue = state["rates"], state["queue"]
    ready = "draining" if state["draining"] else "ready" if state["ready"] else "not ready"
    lines = [
        f"{bold}{_text(state['model'])}{plain}  {ready if ready == 'ready' else red + ready + plain}, "
        f"engine {state['engine']}, up {_span(state['up_seconds'])}"
        + (f", {state['engine_restarts']} restarts" if state["engine_restarts"] else "")
        + ("" if state["scope"] is None else f", tenant {_text(state['scope'])}"),
    ]
    lines += [f"{red}{_text(state[name])}{plain}" for name, good in _GOOD.items() if state[name] != good]
    latencies = rates.get("latency_ms", {})
    lines += [
        f"tokens/s {rates['tokens_per_second']:g}   operations/s {rates['operations_per_second']:g}   "
        f"failures {rates['failures']} (last minute)",
        f"pass {rates['pass_tokens']:g} tokens, {rates['pass_operations']:g} operations, {rates['pass_tenants']:g} "
        f"tenants, {100 * rates['pass_fill']:.0f} % full   engine busy {100 * rates['busy']:.0f} %",
        f"queue {queue['unfinished']} ({queue['in_engine']} in the engine, oldest {queue['oldest_seconds']:g} s)",
    ]
    if latencies:
        times = "   ".join(f"{kind} {median:g}/{high:g}" for kind, (median, high) in latencies.items())
        lines.append(f"latency ms (median/p99)   {times}")
    if paths := state["paths"]:
        lines.append("paths " + "   ".join(f"{path['path']} {'on' if path['exact'] else 'off'}" for path in paths))
        lines += [f"  {_text(path['summary'])}" for path in paths if not path["exact"]]
    lines += ["", *_tenants(state, bold, plain), "", *_models(state, bold, plain)]
    if state["errors"]:
        lines += ["", f"{bold}errors{plain}"]
        lines += [
            f"{dim}{_clock(error['time'])}{plain} {_text(error['tenant'])} {_text(error['model'])} "
            f"{error['number']} {error['kind']}: {_text(error['error'])}"
            for error in state["errors"]
        ]
    return lines


_GOOD: Final = {"last_pass": "no failure", "store": "writable"}


def _tenants(state: State, bold: str, plain: str) -> list[str]:
    head = ("tenant", "live", "detached", "queue", "tokens/s", "today")
    rows = [
        (_text(row["tenant"]), row["live"], row["detached"], row["unfinished"], f"{row['tokens_per_second']:g}",
         row["tokens_today"])
        for row in sorted(state["tenants"], key=lambda row: -row["tokens_per_second"])
    ]  # fmt: skip
    return _table(head, rows, bold, plain)


def _models(state: State, bold: str, plain: str) -> list[str]:
    head = ("model", "tenant", "status", "place", "rank", "queue", "MiB")
    rows = [
        (_text(row["model"]), _text(row["tenant"]), row["status"], row["place"], row["rank"], row["unfinished"],
         f"{row['bytes'] / 2**20:.1f}")
        for row in state["models"]
    ]  # fmt: skip
    more = state["models_total"] - len(rows)
    return _table(head, rows, bold, plain) + ([f"and {more} more models"] if more > 0 else [])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], bold: str, plain: str) -> list[str]:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[place]) for row in texts)]) for place, name in enumerate(head)]
    lines = ["  ".join(name.ljust(width) for name, width in zip(head, widths, strict=True)).rstrip()]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
    return [f"{bold}{lines[0]}{plain}", *lines[1:]]


def _text(value: Any) -> str:
    """Return a text without characters that could control a terminal."""
    return "".join(mark if mark.isprintable() else " " for mark in str(value))


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h {minutes % 60}m" if minutes >= 60 else f"{minutes}m {int(seconds) % 60}s"


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S")

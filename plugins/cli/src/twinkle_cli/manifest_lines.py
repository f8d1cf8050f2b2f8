"""Finds the lines of problems in a manifest, because tomllib does not report positions of keys."""

import re
from dataclasses import dataclass, field
from pathlib import Path

_TABLE = re.compile(r"\s*\[\[?\s*(?P<name>[\w.\-\"' ]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*[\"']?(?P<key>[\w-]+)[\"']?\s*(?P<more>\.[^=]*)?=(?P<value>.*)$")
_PROBLEM = re.compile(
    r"(?:(?P<table>component|command) #(?P<number>\d+)(?: '[^']*')?\.|(?P<hooks>hooks)\.)?"
    r"(?P<key>[\w-]+)(?::| must be )"
)
_NAMED = re.compile(r"component '(?P<name>[^']*)' is of the unknown kind")
_IN_ONE_LINE = re.compile(r"; (?=component '|hooks: )")
_HOOK = re.compile(r"hooks: there is no hook")


@dataclass
class _Table:
    """One table of the file: its kind (`component`, empty for the top), its line, and the lines of its keys."""

    name: str
    line: int
    keys: dict[str, tuple[int, str]] = field(default_factory=dict)


def with_lines(reason: str, path: str) -> str:
    """Return the problems of a manifest, each prefixed with `line N: ` if its line is known.

    Args:
        reason: the text of the error, with one indented problem per line.
        path: the manifest; if it cannot be read, the text is returned unchanged.
    """
    try:
        tables = _tables(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return reason
    head = f"{path}: "
    if reason.startswith(head):
        problems = _IN_ONE_LINE.split(reason.removeprefix(head))
        return head + "; ".join(_with_line(problem, tables) for problem in problems)
    return "\n".join(_with_line(line, tables) for line in reason.split("\n"))


def first_line(reason: str) -> int:
    """Return the first line number in a text of `with_lines`, or 0."""
    match = re.search(r"(?:^|: )\s*line (\d+): ", reason, re.MULTILINE)
    return int(match[1]) if match else 0


def _with_line(text: str, tables: list[_Table]) -> str:
    problem = text.lstrip()
    number = _line_of(problem, tables)
    return f"{text[: len(text) - len(problem)]}line {number}: {problem}" if number else text


def _line_of(problem: str, tables: list[_Table]) -> int:
    components = [table for table in tables if table.name == "component"]
    if component_match := _NAMED.match(problem):
        matching = [table for table in components if component_match["name"] in table.keys.get("name", (0, ""))[1]]
        return _key_of(matching[0], "kind") if matching else 0
    if _HOOK.match(problem):
        return _hooks_line(tables, "implements")
    match = _PROBLEM.match(problem)
    if match is None:
        return 0
    if match["hooks"]:
        return _hooks_line(tables, match["key"])
    if match["table"] is None:
        return tables[0].keys.get(match["key"], (0, ""))[0] or _header(tables, match["key"])
    listed = [table for table in tables if table.name == match["table"]]
    number = int(match["number"])
    return _key_of(listed[number - 1], match["key"]) if 0 < number <= len(listed) else 0


def _key_of(table: _Table, key: str) -> int:
    """Return the line of a key; for a missing key, the line of its table."""
    return table.keys.get(key, (table.line, ""))[0]


def _hooks_line(tables: list[_Table], key: str) -> int:
    """`hooks` is one line at the top, or a separate table."""
    hooks_tables = [table for table in tables if table.name == "hooks"]
    return _key_of(hooks_tables[0], key) if hooks_tables else tables[0].keys.get("hooks", (0, ""))[0]


def _header(tables: list[_Table], name: str) -> int:
    return next((table.line for table in tables if table.name == name), 0)


def _tables(text: str) -> list[_Table]:
    """Return the tables in order, the top first. Keys inside multi-line values are ignored."""
    tables = [_Table("", 0)]
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        outside = not depth and not quote
        if outside and (table := _TABLE.match(line)):
            tables.append(_Table(table["name"].strip("\"' "), number))
            continue
        value = line
        if outside and (key := _KEY.match(line)):
            tables[-1].keys.setdefault(key["key"], (number, key["value"]))
            value = key["value"]
        depth, quote = _open_after(value, depth, quote)
    return tables


def _open_after(text: str, depth: int, quote: str) -> tuple[int, str]:
    """Return how many brackets are open after a line, and which multi-line quotes."""
    position = 0
    while position < len(text):
        if quote:
            if quote[0] == '"' and text[position] == "\\":
                position += 2
            elif text.startswith(quote, position):
                position, quote = position + len(quote), ""
            else:
                position += 1
            continue
        character = text[position]
        if character == "#":
            break
        if character in "\"'":
            quote = character * 3 if text.startswith(character * 3, position) else character
            position += len(quote)
            continue
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
        position += 1
    return max(depth, 0), quote if len(quote) == 3 else ""

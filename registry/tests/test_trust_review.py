"""What a person sees before trusting code: nothing of it is executed, and nothing of it redraws the terminal."""

from pathlib import Path

import pytest

from twinkle_registry.trust.review import MAX_DIFF_LINES, printable, printable_lines, review, review_file
from twinkle_registry.trust.store import Tree, hash_folder


def tree(folder: Path, files: dict[str, str | bytes]) -> Tree:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return Tree(folder, hash_folder(folder, context="test"))


@pytest.mark.parametrize(
    ("text", "reaches"),
    [
        ("import subprocess", "starts processes"),
        ("from os import system", "starts processes"),
        ("import os\nos.execv('a', [])", "starts processes"),
        ("def f():\n    import urllib.request", "uses the network"),
        ("from socket import socket", "uses the network"),
        ("eval('1')", "runs text as code"),
        ("__import__('os')", "runs text as code"),
        ("from importlib import import_module", "runs text as code"),
        ("import torch\ntorch.load('x')", "unpickles"),
        ("import ctypes.util", "calls native code"),
        ("import os\nprint(os.environ)", "reads the environment"),
        ("from shutil import rmtree", "removes files"),
        ("exec(open('x').read())", "runs text as code, opens files"),
        ("import pathlib\npathlib.Path('x').write_text('')", "opens files"),
        ("from pathlib import Path\nPath('x').open()\nPath('x').unlink()", "opens files, removes files"),
        ("import torch\nx = 'subprocess'  # eval", ""),
    ],
)
def test_what_code_reaches_for_is_read_from_its_syntax(text: str, reaches: str) -> None:
    assert ", ".join(review_file("a.py", text.encode()).reaches) == reaches


def test_imports_are_listed_without_executing_anything(tmp_path: Path) -> None:
    text = "import torch.nn as nn, json\nfrom ..x import y\nfrom acme.loss import A\nraise SystemExit\n"
    found = review(tree(tmp_path, {"a.py": text, "data.bin": b"\0\1\2"}))
    assert found.files[0].imports == ("acme.loss", "json", "torch.nn")
    assert found.imports == ["acme", "torch"]
    assert found.size == len(text) + 3
    assert found.diff == ()


def test_native_code_is_named_as_such() -> None:
    for path in ("x.so", "lib/y.so.1", "Z.DLL"):
        assert review_file(path, b"\x7fELF").reaches == ("is native code",)
    assert review_file("x.sonnet", b"").reaches == ()


def test_what_only_tests_need_is_told_apart(tmp_path: Path) -> None:
    files = {"a.py": "import torch", "tests/a.py": "import pytest, torch", "test_b.py": "import hypothesis"}
    found = review(tree(tmp_path, dict(files)))
    assert found.imports == ["torch"]
    assert found.imports_of_tests == ["hypothesis", "pytest"]


@pytest.mark.parametrize("text", [b"def (", b"x = '\0'", b"\xff\xfe", b"(" * 5000, b"# coding: nonsense\n"])
def test_what_cannot_be_parsed_says_so(text: bytes) -> None:
    assert review_file("a.py", text).problem.startswith("cannot be parsed")


def test_the_diff_shows_what_is_new_and_escapes_what_would_redraw(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {"a.py": "x = 1\ny = 2\n", "gone.py": "", "data.bin": b"\0"})
    evil = "x = 1\ny = 3\x1b[2K\ry = 2\nif a != 'user\u202e \u2066# admin':\n"
    new = tree(tmp_path / "new", {"a.py": evil, "more.py": "z = 1\n", "data.bin": b"\0\0"})
    found = review(new, old)
    assert (found.added, found.removed, found.changed) == (("more.py",), ("gone.py",), ("a.py", "data.bin"))
    assert "+y = 3\\x1b[2K\\ry = 2" in found.diff
    assert "+if a != 'user\\u202e \\u2066# admin':" in found.diff
    assert "data.bin: 1 bytes before, 2 now; too large, or not text" in found.diff
    assert all(line.isprintable() for line in found.diff)


def test_a_long_diff_ends_and_says_so(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {"a.py": ""})
    new = tree(tmp_path / "new", {"a.py": "x = 1\n" * 1000})
    diff = review(new, old).diff
    assert len(diff) == MAX_DIFF_LINES + 1
    assert diff[-1].startswith("... more than 400 lines")


def test_a_long_line_hides_nothing_silently(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {"a.py": ""})
    new = tree(tmp_path / "new", {"a.py": "x = 1" + " " * 2000 + "; evil()\n"})
    assert review(new, old).diff[-1].endswith("... and 1014 more characters")


def test_files_that_would_take_difflib_hours_are_only_named(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {"z.py": "\n"})
    new = tree(tmp_path / "new", {"z.py": "\n" * 9000})
    assert review(new, old).diff == ("z.py: 1 bytes before, 9000 now; too large, or not text",)


def test_printable_keeps_text_and_tabs() -> None:
    assert printable("ä\tß 😀") == "ä\tß 😀"
    assert printable("a\u2028b\x07") == "a\\u2028b\\x07"
    assert printable_lines("a\u2028b\r\nc\n".encode()) == ["a\\u2028b", "c"]
    assert printable_lines(b"\xff") == ["\\xff"]

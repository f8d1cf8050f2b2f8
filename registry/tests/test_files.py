"""`./file.py:Name`: the user's own code, imported without touching sys.path."""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import ComponentNotFound, PluginBroken, Registry

House = Callable[..., Registry]
SOURCE = """
import dataclasses

@dataclasses.dataclass
class Thing:
    value: int = {}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.mark.timeout(60)  # a reader that waits for the pipe would wait for ever
def test_a_pipe_in_the_place_of_a_file_is_refused(work: Path, house: House) -> None:
    os.mkfifo(work / "mine.py")
    with pytest.raises(ComponentNotFound, match=r"mine\.py cannot be read \(it is a pipe, not a regular file\)"):
        house().build("./mine.py:Thing", "optimizer")


def test_relative_absolute_and_home_paths_are_understood(work: Path, tmp_path: Path, house: House) -> None:
    (work / "mine.py").write_text(SOURCE.format(1))
    (tmp_path / "home" / "sub").mkdir(parents=True)
    (tmp_path / "home" / "sub" / "mine.py").write_text(SOURCE.format(2))
    (tmp_path / "up.py").write_text(SOURCE.format(3))
    registry = house()
    build = registry.build
    assert build("./mine.py:Thing", "optimizer").value == 1
    assert build("mine.py:Thing", "optimizer").value == 1
    assert build(f"{work}/mine.py:Thing", "optimizer").value == 1
    assert build("~/sub/mine.py:Thing", "optimizer").value == 2
    assert build("../up.py:Thing", "optimizer").value == 3
    assert registry.resolve("./mine.py:Thing.__init__", "optimizer").__name__ == "__init__"


def test_it_is_imported_once_and_leaves_nothing_on_the_path(work: Path, house: House) -> None:
    (work / "mine.py").write_text(SOURCE.format(1))
    registry = house()
    before = list(sys.path)
    first = registry.resolve("./mine.py:Thing", "optimizer")
    assert registry.resolve(f"{work}/mine.py:Thing", "optimizer") is first
    assert sys.path == before
    assert "mine" not in sys.modules
    assert first.__module__.startswith("twinkle_registry.files.mine_")
    assert pickle.loads(pickle.dumps(first())) == first()
    assert not list(work.glob("__pycache__"))


def test_two_files_of_one_name_live_side_by_side(work: Path, house: House) -> None:
    registry = house()
    for folder, value in (("a", 1), ("b", 2), ("c", 2)):
        (work / folder).mkdir()
        (work / folder / "loss-v2.py").write_text(SOURCE.format(value))
    found = [registry.resolve(f"./{folder}/loss-v2.py:Thing", "optimizer") for folder in "abc"]
    assert len({cls.__module__ for cls in found}) == 3
    assert [cls().value for cls in found] == [1, 2, 2]


def test_an_edited_file_is_a_new_module(work: Path, house: House) -> None:
    registry = house()
    (work / "mine.py").write_text(SOURCE.format(1))
    old = registry.resolve("./mine.py:Thing", "optimizer")
    (work / "mine.py").write_text(SOURCE.format(2))
    assert registry.build("./mine.py:Thing", "optimizer").value == 2
    assert old().value == 1


def test_its_source_is_found_by_inspect_and_tracebacks(work: Path, house: House) -> None:
    import inspect

    (work / "mine.py").write_text(SOURCE.format(1))
    cls = house().resolve("./mine.py:Thing", "optimizer")
    assert "value: int = 1" in inspect.getsource(cls)
    assert sys.modules[cls.__module__].__file__ == str(work / "mine.py")


def test_a_missing_file_says_what_lies_beside_it(work: Path, house: House) -> None:
    registry = house()
    (work / "my_loss.py").write_text("")
    with pytest.raises(ComponentNotFound) as error:
        registry.resolve("./my_los.py:Thing", "optimizer")
    assert str(error.value) == (
        f"optimizer './my_los.py:Thing': there is no file {work}/my_los.py; "
        "of the Python files beside it, nearest: 'my_loss.py'"
    )
    with pytest.raises(ComponentNotFound, match=f"there is no folder {work}/absent"):
        registry.resolve("./absent/x.py:Thing", "optimizer")
    (work / "folder.py").mkdir()
    with pytest.raises(ComponentNotFound, match="cannot be read"):
        registry.resolve("./folder.py:Thing", "optimizer")


def test_a_missing_name_says_the_nearest(work: Path, house: House) -> None:
    (work / "mine.py").write_text(SOURCE.format(1))
    with pytest.raises(ComponentNotFound, match=r"has no 'Thin'; nearest: 'Thing'"):
        house().resolve("./mine.py:Thin", "optimizer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "failed: SyntaxError: invalid syntax"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("import flash_foo", "failed: it needs the module 'flash_foo', which is not installed"),
    ],
)
def test_a_file_that_raises_keeps_its_cause_and_can_be_tried_again(
    work: Path, house: House, text: str, message: str
) -> None:
    (work / "mine.py").write_text(text)
    registry = house()
    for _ in range(2):
        with pytest.raises(PluginBroken) as error:
            registry.resolve("./mine.py:Thing", "optimizer")
        assert f"optimizer './mine.py:Thing': importing {work}/mine.py {message}" in str(error.value)
        assert error.value.__cause__ is not None
    assert not [name for name in sys.modules if name.startswith("twinkle_registry.files.mine_")]


def test_a_file_that_imports_its_neighbour_says_what_to_do(work: Path, house: House) -> None:
    (work / "mine.py").write_text("import helper")
    (work / "helper.py").write_text("")
    with pytest.raises(PluginBroken) as error:
        house().resolve("./mine.py:Thing", "optimizer")
    assert "helper.py is in the same folder, but a single file cannot import its neighbours" in str(error.value)


def test_threads_that_race_get_one_module(work: Path, house: House) -> None:
    (work / "mine.py").write_text("import time; time.sleep(0.05)\nclass Thing: ...\n")
    registry = house()
    found: list[Any] = []

    def work_on() -> None:
        found.append(registry.resolve("./mine.py:Thing", "optimizer"))

    threads = [threading.Thread(target=work_on) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1

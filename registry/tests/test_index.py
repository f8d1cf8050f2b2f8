"""The index of published components: its files, the search, and what an unknown name is told."""

from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import ComponentNotFound, ManifestError, index
from twinkle_registry.index import IndexEntry, index_entries, read_index, search, where_to_get

ROOT = Path(__file__).parents[2]
ENTRY = """
[[component]]
kind = "loss"
name = "FocalLoss"
package = "acme-losses"
summary = "Focal loss"
author = "Acme"
"""
HUB = ENTRY.replace('package = "acme-losses"', 'repository = "hf://acme/focal"')


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str) -> Path:
        file = tmp_path / "index.toml"
        file.write_text(text, "utf-8")
        return file

    return written


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, write: Any) -> Any:
    """Put entries in the place of the index."""

    def put(text: str) -> None:
        entries = tuple(read_index(write("schema = 1\n" + text)))
        monkeypatch.setattr(index, "index_entries", lambda: entries)

    return put


@pytest.mark.parametrize("file", sorted((ROOT / "registry" / "index").glob("*.toml")), ids=lambda file: file.name)
def test_every_file_of_the_index_is_right(file: Path) -> None:
    assert read_index(file)


def test_the_first_entry_is_the_published_community_component() -> None:
    first = index_entries()[0]
    assert (first.kind, first.name) == ("patch", "qwen3_moe_transformers4_patch")
    assert first.author == "ModelScope Official"
    assert first.command == f"twinkle plugins add {first.repository}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ENTRY.replace("summary", "sumary"), "component #1 'FocalLoss'.sumary: unknown key, nearest: 'summary'"),
        (ENTRY.replace("summary", "sumary"), "component #1 'FocalLoss'.summary: missing"),
        (ENTRY.replace('"loss"', "3"), "component #1 'FocalLoss'.kind must be a kind such as 'loss', got 3 (int)"),
        (ENTRY.replace("Focal loss", "two\\nlines"), "summary must be one line of text, got"),
        (ENTRY.replace("package", "licence"), "package: set either package or repository"),
        (ENTRY + 'repository = "hf://acme/focal"\n', "package: set either package or repository"),
        (HUB.replace("hf://", "ftp://"), "repository must be 'hf://org/repo' or 'ms://org/repo', got"),
        (ENTRY + 'homepage = "javascript:x"\n', "homepage must be a URL that starts with https://"),
        (ENTRY + ENTRY, "component: loss FocalLoss acme-losses is listed twice"),
    ],
)
def test_what_is_wrong_with_an_entry_is_told(text: str, problem: str, write: Any) -> None:
    with pytest.raises(ManifestError) as error:
        read_index(write("schema = 1\n" + text))
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "schema: missing"),
        ("schema = 2", "schema must be the number 1, got 2"),
        ("schema = 1\ncomponent = 3", "component must be a list of tables [[component]], got 3"),
        ("schema = ", "not a TOML file in UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(text: str, problem: str, write: Any) -> None:
    with pytest.raises(ManifestError) as error:
        read_index(write(text))
    assert problem in str(error.value)


ENTRIES = [
    IndexEntry("loss", "PolyLoss", "Beside focal loss", "Acme", package="acme-poly"),
    IndexEntry("loss", "FocalLoss", "Fewer easy tokens", "Acme", package="acme-losses"),
    IndexEntry("metric", "Focus", "How focal a model is", "Bolt", repository="ms://bolt/focus"),
]


@pytest.mark.parametrize(
    ("words", "kind", "names"),
    [
        ([], "", ["PolyLoss", "FocalLoss", "Focus"]),
        (["FOCAL"], "", ["FocalLoss", "PolyLoss", "Focus"]),
        (["focal", "acme"], "", ["FocalLoss", "PolyLoss"]),
        (["focal"], "metric", ["Focus"]),
        (["ms://bolt"], "", ["Focus"]),
        (["focal", "nothing"], "", []),
    ],
)
def test_every_word_counts_and_names_come_first(words: list[str], kind: str, names: list[str]) -> None:
    assert [entry.name for entry in search(words, kind, ENTRIES)] == names


def test_an_unknown_name_that_the_index_has_says_where(known: Any, house: Any, site: Any, table: Any) -> None:
    known(ENTRY)
    site.plugin("other", table("OtherLoss", "other.a:L"))
    with pytest.raises(ComponentNotFound) as error:
        house().find("FocalLoss", "loss")
    assert str(error.value).endswith("; the index lists it in 'acme-losses'; run: pip install acme-losses")
    with pytest.raises(ComponentNotFound, match="the index lists it as 'FocalLoss' in 'acme-losses'"):
        house().find("focalloss", "loss")
    with pytest.raises(ComponentNotFound) as error:
        house().find("acme-losses/FocalLoss", "loss")
    assert str(error.value).endswith("; the index lists it in 'acme-losses'; run: pip install acme-losses")
    with pytest.raises(ComponentNotFound, match="if it is a package that you trust, install it first"):
        house().find("stranger/FocalLoss", "loss")


def test_code_of_a_hub_is_to_be_looked_at_first(known: Any, house: Any) -> None:
    known(HUB)
    with pytest.raises(ComponentNotFound) as error:
        house().find("FocalLoss", "loss")
    told = "the index lists it in 'hf://acme/focal'; review it first: twinkle plugins add hf://acme/focal"
    assert str(error.value).endswith(told)


def test_what_is_installed_already_is_no_answer(known: Any, house: Any, site: Any, table: Any) -> None:
    known(ENTRY)
    site.plugin("Acme_Losses", table("OtherLoss", "other.a:L"))
    with pytest.raises(ComponentNotFound) as error:
        house().find("FocalLoss", "loss")
    assert "index" not in str(error.value)


def test_another_kind_is_no_answer_and_a_tenant_is_told_nothing(known: Any, house: Any) -> None:
    known(ENTRY)
    for find in (house().find, house().view([]).find):
        with pytest.raises(ComponentNotFound) as error:
            find("FocalLoss", "metric" if find.__self__.__class__.__name__ == "Registry" else "loss")
        assert "index" not in str(error.value)


def test_a_damaged_index_never_hides_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise ManifestError("index.toml: 1 wrong")

    monkeypatch.setattr(index, "index_entries", damaged)
    assert where_to_get("FocalLoss") == ""

"""The comparison with the published interface: it finds differences, and each one is explained."""

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def published() -> Any:
    spec = importlib.util.spec_from_file_location("published", DOCS / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_generator_writes(published: Any) -> None:
    text = (DOCS / "reference" / "published-api.md").read_text("utf-8")
    assert published.page() in text, "run: python docs/tables.py"


def test_every_difference_is_explained_and_no_explanation_is_stale(published: Any) -> None:
    known = published.data()
    findings = [published.compare(entry, known["passed_to"]) for entry in published.entries(known["group"])]
    published.check(findings, known["differences"], known["absent"])
    assert len(findings) > 500
    assert len({finding.entry.key for finding in findings}) == len(findings), "an entry is listed twice"
    fewer = dict(list(known["differences"].items())[1:])
    with pytest.raises(published.NotExplained, match="is different and not explained"):
        published.check(findings, fewer, known["absent"])
    with pytest.raises(published.NotExplained, match="twinkle:initialize is stale"):
        published.check(findings, known["differences"] | {"twinkle:initialize": "why"}, known["absent"])
    with pytest.raises(published.NotExplained, match="framework_util is absent and not explained"):
        published.check(findings, known["differences"], {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(a, b=1, *, c=None)", []),
        ("f(a, b=..., **kwargs)", []),
        ("f(a, b=2)", ["`b` is `1`, published `2`"]),
        ("f(a, b=True)", ["`b` is `1`, published `True`"]),
        ("f(a=0)", ["`a` is required, published `0`"]),
        (
            "f(b=1, a=...)",
            ["`b` is positional argument 2, published 1", "`a` is positional argument 1", "`a` is required"],
        ),
        ("f(a, b=1, c=None)", ["`c` must be given by keyword"]),
        ("f(a, z)", ["`z` is not accepted"]),
    ],
)
def test_what_a_published_call_could_not_do_is_named(published: Any, text: str, expected: list[str]) -> None:
    def ours(self: Any, a: int, b: int = 1, *, c: None = None, more: int = 0) -> None: ...

    found = list(published._differences(text, inspect.signature(ours)))
    assert len(found) == len(expected)
    for one, part in zip(found, expected, strict=True):
        assert part in one


def test_arguments_that_end_in_keywords_are_told_apart(published: Any) -> None:
    def ours(a: int, **kwargs: Any) -> None: ...

    signature = inspect.signature(ours)
    assert list(published._differences("f(a, b=1)", signature)) == ["`b` is not accepted"]
    assert list(published._differences("f(a, b=1)", signature, {"b"})) == ["`b` is read from the keyword arguments"]
    entry = published.Entry("twinkle.model", "f", "f()", None, {})
    with pytest.raises(published.NotExplained, match=r"there is no twinkle\.model:NoSuchModel"):
        published._names_of(["twinkle.model:NoSuchModel"])
    assert published.compare(entry).state == "absent"


def test_a_backend_that_has_come_must_be_compared(published: Any) -> None:
    group = {"module": "twinkle.loss", "later": "soon", "attributes": ["GRPOLoss", "NoSuchLoss"]}
    states = [published.compare(entry).state for entry in published.entries([group])]
    assert states == ["different", "later"]
    client = {"module": "twinkle_client.no_such_module", "attributes": ["TwinkleClient"]}
    assert [published.compare(entry).state for entry in published.entries([client])] == ["absent"]
    typed = {"module": "twinkle.data_format", "fields": {"ModelOutput": ["logits", "no_such_field"]}}
    assert published.compare(next(published.entries([typed]))).text == "has no no_such_field"

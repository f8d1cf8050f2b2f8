"""The page on preprocessors names every component that it is about."""

from pathlib import Path

import pytest

from twinkle import registry

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "researcher" / "preprocessors.md"


@pytest.mark.parametrize("kind", ["preprocessor", "filter", "loss_scale"])
def test_every_component_is_on_the_page(kind: str) -> None:
    text = PAGE.read_text("utf-8")
    names = [
        name for name, specs in registry().specs(kind).items() if any(spec.dist == "twinkle-data" for spec in specs)
    ]
    assert len(names) >= 5
    assert [name for name in names if f"| `{name}" not in text] == []

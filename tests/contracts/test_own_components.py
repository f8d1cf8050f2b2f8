"""Every component of our own plugins keeps the contract of its kind; what cannot be checked here says why."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from house import MEMBERS

import twinkle
from twinkle_registry import ComponentSpec, missing_requirements
from twinkle_testing.contracts import examine

OURS = {member.name for member in MEMBERS}
SPECS = [
    spec
    for record in twinkle.registry().records
    if record.name in OURS and record.manifest
    for spec in record.manifest.components
]
NOTHING_TO_CHECK = {
    ("patch", "Patch"): "base class",
    ("preprocessor", "Preprocessor"): "base class",
}
"""Components of which every check is skipped, and a word of the reason that is given."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


HEAVY = {
    ("model", "MultiLoraTransformersModel"), ("optimizer", "LBFGS"),
    *(("recipe", name) for name in ("dpo", "embedding", "gkd", "grpo", "rloo")),
}  # fmt: skip
"""Components whose checks take long; those of the recipe `sft` are the same."""


def marked(spec: ComponentSpec) -> Any:
    marks = [pytest.mark.full] if (spec.kind, spec.name) in HEAVY else []
    return pytest.param(spec, id=f"{spec.kind}:{spec.name}", marks=marks)


@pytest.mark.parametrize("spec", [marked(spec) for spec in SPECS])
def test_it_keeps_its_contract(spec: ComponentSpec) -> None:
    report = examine(spec, spec.kind)
    assert report.ok, report.text()
    reason = NOTHING_TO_CHECK.get((spec.kind, spec.name))
    if report.only_skipped and missing_requirements(spec):
        pytest.skip(report.results[0].why)
    assert report.only_skipped == bool(reason), report.text()
    if reason:
        assert reason in report.results[0].why

"""Every component of our own plugins keeps the contract of its kind; what cannot be checked here says why."""

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from house import MEMBERS

import twinkle
from twinkle.kinds import KINDS
from twinkle.testing import checks_for
from twinkle_registry import ComponentSpec, missing_requirements
from twinkle_testing.contracts import examine
from twinkle_testing.contracts.case import example_keys
from twinkle_testing.contracts.running import about

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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_checks_that_say_what_they_are(kind: str) -> None:
    checks = checks_for(kind)
    assert len(checks) >= 5
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.statement.endswith("."), check.name
        assert len(check.statement) < 140, check.name


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_an_example_is_explained(kind: str) -> None:
    case = import_module(f"twinkle_testing.contracts.{kind}").CASE
    assert case.kind == kind
    assert {*about(kind), "kwargs", "skip"} == set(example_keys(case))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}:{spec.name}")
def test_it_keeps_its_contract(spec: ComponentSpec) -> None:
    report = examine(spec, spec.kind)
    assert report.ok, report.text()
    reason = NOTHING_TO_CHECK.get((spec.kind, spec.name))
    if report.only_skipped and missing_requirements(spec):
        pytest.skip(report.results[0].why)
    assert report.only_skipped == bool(reason), report.text()
    if reason:
        assert reason in report.results[0].why

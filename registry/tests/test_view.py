"""A tenant's view: what is not on the list does not exist."""

from collections.abc import Callable
from typing import Any

import pytest

from twinkle_registry import ArgumentError, ComponentNotFound, ComponentTypeError, NotTrusted, Registry

House = Callable[..., Registry]


@pytest.fixture
def registry(site: Any, table: Any, house: House, loss_source: str) -> Registry:
    for dist in ("acme", "other"):
        refs = table("PlainLoss", f"{dist}.loss:PlainLoss") + table(f"{dist}Loss", f"{dist}.loss:PlainLoss")
        site.plugin(dist, refs, loss=loss_source.format(dist))
    return house()


def test_only_what_is_listed_is_there(registry: Registry) -> None:
    view = registry.view(["loss:acmeLoss", "other/otherLoss"])
    assert view.names("loss") == ["acmeLoss", "otherLoss"]
    assert view.names("metric") == []
    assert view.resolve("acmeLoss", "loss") is registry.resolve("acmeLoss", "loss")
    assert view.build("other/otherLoss", "loss", beta=2.0).beta == 2.0
    with pytest.raises(ArgumentError, match="unknown argument 'bata', nearest: 'beta'"):
        view.build("acmeLoss", "loss", bata=1)


def test_what_is_not_listed_is_not_found_and_not_named(registry: Registry) -> None:
    view = registry.view(["loss:acmeLoss"])
    with pytest.raises(ComponentNotFound) as error:
        view.resolve("otherLoss", "loss")
    assert str(error.value) == "loss 'otherLoss': no installed plugin offers it; known: 'acmeLoss'"
    with pytest.raises(ComponentNotFound, match="there is no kind 'los'"):
        view.names("los")


def test_two_providers_of_which_one_is_listed_are_no_conflict(registry: Registry) -> None:
    view = registry.view(["acme/PlainLoss"])
    assert view.find("PlainLoss", "loss").dist == "acme"
    with pytest.raises(ComponentNotFound):
        view.find("other/PlainLoss", "loss")


def test_a_star_stands_for_a_whole_kind_or_plugin(registry: Registry) -> None:
    assert registry.view(["loss:*"]).names("loss") == registry.names("loss")
    assert registry.view(["other/*"]).names("loss") == ["PlainLoss", "otherLoss"]


def test_the_list_is_read_at_each_call(registry: Registry) -> None:
    allow = {"loss:acmeLoss"}
    live, computed, once = registry.view(allow), registry.view(lambda: allow), registry.view(iter(["loss:acmeLoss"]))
    assert [v.names("loss") for v in (live, computed, once)] == [["acmeLoss"]] * 3
    allow.add("loss:otherLoss")
    assert [v.names("loss") for v in (live, computed, once)] == [
        ["acmeLoss", "otherLoss"],
        ["acmeLoss", "otherLoss"],
        ["acmeLoss"],
    ]


@pytest.mark.parametrize(
    "reference", ["acme.loss:PlainLoss", "./x.py:L", "hf://org/repo#L", "/etc/x.py:L", len, None, 3]
)
def test_code_from_elsewhere_is_refused(registry: Registry, reference: Any) -> None:
    view = registry.view(["loss:acmeLoss"])
    for call in (view.resolve, view.build):
        with pytest.raises(
            NotTrusted, match="only names of installed components are allowed here; there are 'acmeLoss'"
        ):
            call(reference, "loss")
    with pytest.raises(NotTrusted, match="there is no metric"):
        view.resolve("a.b:C", "metric")


def test_a_text_is_not_a_list(registry: Registry) -> None:
    with pytest.raises(
        ComponentTypeError, match=r"allow must be a list such as \['loss:GRPOLoss'\], got 'loss:acmeLoss'"
    ):
        registry.view("loss:acmeLoss")

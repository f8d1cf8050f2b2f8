"""Every form that a component argument may have, and the one error that each wrong form gets."""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import (
    ComponentNotFound,
    ComponentTypeError,
    PluginBroken,
    Registry,
    TwinkleError,
    installed_plugins,
)

House = Callable[..., Registry]


@pytest.fixture
def registry(site: Any, table: Any, house: House, loss_source: str) -> Registry:
    site.plugin("acme", table("PlainLoss", "acme.loss:PlainLoss"), loss=loss_source.format("acme"))
    return house()


def test_an_instance_is_itself(registry: Registry) -> None:
    instance = registry.build("PlainLoss", "loss")
    assert registry.resolve(instance, "loss") is instance


def test_a_class_is_itself(registry: Registry) -> None:
    cls = registry.resolve("PlainLoss", "loss")
    assert registry.resolve(cls, "loss") is cls


def test_a_function_passes_where_the_contract_is_callable(registry: Registry) -> None:
    def loss(inputs: Any) -> int:
        return 1

    class Holder:
        def loss(self, inputs: Any) -> int:
            return 1

    for function in (loss, lambda inputs: 1, functools.partial(loss, 1), Holder().loss, sum):
        assert registry.resolve(function, "loss") is function
    with pytest.raises(
        ComponentTypeError, match=r"without 'accumulate', 'calculate', 'name', which house_contracts.Metric"
    ):
        registry.resolve(loss, "metric")


def test_names_and_refs_mean_the_same_object(registry: Registry) -> None:
    cls = registry.resolve("PlainLoss", "loss")
    assert cls.__module__ == "acme.loss"
    assert registry.resolve("acme/PlainLoss", "loss") is cls
    assert registry.resolve("acme.loss:PlainLoss", "loss") is cls
    assert registry.resolve(registry.find("PlainLoss", "loss"), "loss") is cls


def test_a_ref_may_have_dots_and_need_no_plugin(site: Any, registry: Registry) -> None:
    site.write("mine.py", "class Outer:\n    class Inner:\n        x = 1\n")
    assert registry.resolve("mine:Outer.Inner", "optimizer").x == 1


def test_without_a_contract_anything_but_none_passes(registry: Registry) -> None:
    for thing in (object(), object, len, 3):
        assert registry.resolve(thing, "optimizer") is thing
    with pytest.raises(
        ComponentTypeError, match="the optimizer is None; pass a class, a function, an instance or a name"
    ):
        registry.resolve(None, "optimizer")


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (
            None,
            "the loss is None; pass an instance of house_contracts.Loss, a class of that kind, a function or a name",
        ),
        (3, "the loss is 3 (builtins.int), not an instance of house_contracts.Loss; pass an instance"),
        (dict, "the loss is the class builtins.dict, not a subclass of house_contracts.Loss; pass an instance"),
        (["x" * 200], "the loss is an instance of builtins.list, not an instance of house_contracts.Loss; pass"),
        (b"x" * 200, "...("[:3]),
    ],
)
def test_what_does_not_fit_the_contract_is_refused(registry: Registry, thing: Any, text: str) -> None:
    with pytest.raises(ComponentTypeError) as error:
        registry.resolve(thing, "loss")
    assert text in str(error.value)
    assert isinstance(error.value, TypeError)


def test_a_named_component_that_does_not_fit_names_it(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.m:X"), m="class X: ...")
    with pytest.raises(
        ComponentTypeError, match=r"loss 'L' is the class acme.m.X, not a subclass of house_contracts.Loss"
    ):
        house().resolve("L", "loss")


def test_a_protocol_is_fulfilled_by_having_its_members(registry: Registry) -> None:
    class Good:
        def __init__(self) -> None:
            self.name = "good"

        def accumulate(self, value: Any) -> None: ...
        def calculate(self) -> float:
            return 0.0

    class Partial:
        name = "partial"
        accumulate = None

        def calculate(self) -> float:
            return 0.0

    instance = Good()
    assert registry.resolve(Good, "metric") is Good
    assert registry.resolve(instance, "metric") is instance
    with pytest.raises(ComponentTypeError, match=r"without 'accumulate', which house_contracts.Metric requires"):
        registry.resolve(Partial, "metric")
    del instance.name
    with pytest.raises(ComponentTypeError, match=r"without 'name', which"):
        registry.resolve(instance, "metric")
    with pytest.raises(ComponentTypeError, match="not an object with the methods of"):
        registry.resolve(sys, "metric")


def test_a_protocol_with_a_call_is_not_fulfilled_by_every_class(
    site: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write("calling.py", "from typing import Protocol\nclass Call(Protocol):\n    def __call__(self, x): ...\n")
    monkeypatch.setitem(registry._kinds, "optimizer", "calling:Call")
    with pytest.raises(ComponentTypeError, match=r"without '__call__'"):
        registry.resolve(dict, "optimizer")
    assert registry.resolve(functools.partial, "optimizer") is functools.partial


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PlainLos", "loss 'PlainLos': no installed plugin offers it; nearest: 'PlainLoss'"),
        ("acme.loss.PlainLoss", "if it is a Python path, write 'acme.loss:PlainLoss'"),
        ("loss:PlainLoss", "loss 'loss:PlainLoss': remove the kind and write 'PlainLoss'"),
        ("acme.loss:PlainLos", "loss 'acme.loss:PlainLos': acme.loss has no 'PlainLos'; nearest: 'PlainLoss'"),
        ("acme.absent:X", "loss 'acme.absent:X': there is no module 'acme.absent'"),
        ("absent.module:X", "loss 'absent.module:X': there is no module 'absent'"),
        ("acme loss:X", "loss 'acme loss:X' is not of the form 'package.module:Attr'"),
        ("acme.loss:", "loss 'acme.loss:' is not of the form 'package.module:Attr'"),
        (":X", "loss ':X' is not of the form 'package.module:Attr'"),
        ("acme/", "loss 'acme/' has no name; write a name, 'plugin/Name'"),
        ("", "loss '' has no name; write a name"),
        ("./file.py", "loss './file.py' is a file; add the name of a component: './file.py:Name'"),
        ("./folder", "loss './folder' is a path; give a file and the name of a component: './file.py:Name'"),
        ("file.py", "loss 'file.py' is a file; add the name of a component: 'file.py:Name'"),
        ("./file.py:", "add the name of a component: './file.py:Name'"),
        ("hf://org/repo@main#Loss", "no installed plugin reads hf://; run: pip install twinkle-hub"),
        ("ms://org/repo", "no installed plugin reads ms://; run: pip install twinkle-hub"),
        ("file:///folder#Loss", "no installed plugin reads file://; run: pip install twinkle-hub"),
        ("s3://bucket/x", "loss 's3://bucket/x': no installed plugin reads s3://; there are none"),
    ],
)
def test_a_text_that_names_nothing_says_what_to_do(registry: Registry, text: str, message: str) -> None:
    with pytest.raises(ComponentNotFound) as error:
        registry.resolve(text, "loss")
    assert message in str(error.value)


def test_a_module_that_raises_is_broken_and_keeps_its_cause(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.m:L"), m="raise OSError('no device')")
    registry = house()
    for text, who in (("L", "loss 'L' of acme"), ("acme.m:L", "loss 'acme.m:L'")):
        with pytest.raises(PluginBroken) as error:
            registry.resolve(text, "loss")
        told = f"{who}: importing acme.m failed: OSError: no device"
        assert re.fullmatch(rf"{re.escape(told)} \(/.*/acme/m\.py:1\)", str(error.value))
        assert isinstance(error.value.__cause__, OSError)


def test_the_innermost_line_that_ran_is_named_whatever_form_is_used(
    site: Any, table: Any, house: House, tmp_path: Path
) -> None:
    site.plugin("acme", table("L", "acme.m:L"), m="from . import deep", deep="def f():\n    return 1 / 0\n\nf()\n")
    with pytest.raises(PluginBroken, match=r"ZeroDivisionError: division by zero \(/.*/acme/deep\.py:2\)$"):
        house().resolve("L", "loss")
    file = tmp_path / "bad.py"
    file.write_text("x = 1\n\ny = x / 0\n")
    with pytest.raises(PluginBroken, match=rf"division by zero \({re.escape(str(file))}:3\)$"):
        house().resolve(f"{file}:L", "loss")
    site.plugin("bees", table("B", "bees.m:B"), m="def f(:")
    with pytest.raises(PluginBroken, match=r"SyntaxError: .* \(m\.py, line 1\)$"):
        house().resolve("B", "loss")


def test_a_module_that_exits_is_broken_too(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.m:L"), m="import sys; sys.exit(3)")
    with pytest.raises(PluginBroken, match=r"importing acme\.m failed: SystemExit: 3"):
        house().resolve("L", "loss")


def test_a_missing_module_inside_is_not_a_missing_component(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.m:L"), m="import flash_foo.ops")
    registry = house()
    for text in ("L", "acme.m:L"):
        with pytest.raises(PluginBroken) as error:
            registry.resolve(text, "loss")
        assert "importing acme.m failed: it needs the module 'flash_foo', which is not installed" in str(error.value)
        assert "pip install" not in str(error.value)
        assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_a_manifest_that_promises_too_much_is_the_plugins_fault(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.absent:L") + table("M", "acme.m:Absent"), m="Absence = 1")
    registry = house()
    with pytest.raises(PluginBroken) as error:
        registry.resolve("L", "loss")
    assert str(error.value) == (
        "loss 'L' of acme: there is no module 'acme.absent', but its manifest names 'acme.absent:L'; "
        "reinstall it, or report this to its author"
    )
    with pytest.raises(PluginBroken, match=r"loss 'M' of acme: acme.m has no 'Absent'; nearest: 'Absence'"):
        registry.resolve("M", "loss")


def test_a_relative_ref_starts_at_the_package(site: Any, table: Any, house: House, loss_source: str) -> None:
    site.plugin("acme", table("L", ".loss:PlainLoss") + table("M", ".:Shared"), loss=loss_source)
    site.write("acme/__init__.py", "from .loss import PlainLoss as Shared")
    registry = house()
    assert registry.resolve("L", "loss") is registry.resolve("M", "loss")
    from dataclasses import replace

    by_hand = replace(registry.find("L", "loss"), ref=".loss:PlainLoss", root="acme")
    assert registry.load(by_hand) is registry.resolve("L", "loss")
    assert registry.load(replace(by_hand, ref=".:Shared")) is registry.resolve("L", "loss")


HUB = """
class Hub:
    def commit_of(self, repo, revision): ...
    def download_code(self, repo, commit, target): ...
class Weights: ...
"""


def test_a_hub_is_a_component_named_by_its_scheme(site: Any, table: Any, house: House) -> None:
    refs = table("hf", "acme_hub.m:Hub", kind="hub") + table("s3", "acme_hub.m:Weights", kind="optimizer")
    site.plugin("acme-hub", refs, m=HUB)
    registry = house()
    with pytest.raises(ComponentNotFound, match=r"no installed plugin reads hfs://; nearest: 'hf'"):
        registry.resolve("hfs://org/repo", "loss")


def test_a_hub_that_cannot_be_used_says_why(site: Any, table: Any, house: House) -> None:
    site.plugin("acme-hub", table("hf", "acme_hub.m:Hub", kind="hub"), core=">=3", m=HUB)
    with pytest.raises(TwinkleError, match="plugin acme-hub offers it but is incompatible"):
        house().resolve("hf://org/repo", "loss")


def test_a_contract_that_is_not_there_is_the_fault_of_core(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._kinds, "loss", "house_absent:Loss")
    with pytest.raises(PluginBroken, match="the contract of loss: there is no module 'house_absent', but core names"):
        registry.resolve("PlainLoss", "loss")


def test_a_component_is_resolved_once_until_the_plugins_change(
    site: Any, table: Any, registry: Registry, loss_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    load = Registry.load
    monkeypatch.setattr(Registry, "load", lambda self, spec: loads.append(spec.dist) or load(self, spec))
    cls = registry.resolve("PlainLoss", "loss")
    for request in ("PlainLoss", "acme/PlainLoss", registry.find("PlainLoss", "loss")):
        assert registry.resolve(request, "loss") is cls
    assert loads == ["acme"]
    registry.withdraw("acme")
    with pytest.raises(ComponentNotFound):
        registry.resolve("PlainLoss", "loss")
    site.plugin("other", table("PlainLoss", "other.loss:PlainLoss"), loss=loss_source.format("other"))
    (record,) = [record for record in installed_plugins() if record.dist == "other"]
    registry.add(record)
    assert registry.resolve("PlainLoss", "loss").__module__ == "other.loss"
    assert loads == ["acme", "other"]

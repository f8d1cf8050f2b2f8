"""Lifecycle hooks: imported when first fired, isolated from each other, and exactly those of the manifest."""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_registry import (
    ArgumentError,
    ComponentConflict,
    ComponentNotFound,
    ComponentTypeError,
    PluginBroken,
    Registry,
    hookimpl,
)

House = Callable[..., Registry]
STEP = 'hooks = { module = "NAME.hooks", implements = ["twinkle_step_end"] }\n'
IMPLEMENTATION = "from twinkle_registry import hookimpl\n@hookimpl\ndef twinkle_step_end(metrics):\n    return {}\n"


def add(site: Any, name: str, source: str, implements: str = "twinkle_step_end", more: str = "") -> None:
    hooks = STEP.replace("NAME", name).replace(
        '"twinkle_step_end"', implements if '"' in implements else f'"{implements}"'
    )
    site.plugin(name, hooks + more, hooks=source)


def test_every_implementation_is_called_with_what_it_asks_for(site: Any, house: House) -> None:
    add(site, "acme", IMPLEMENTATION.format('metrics["loss"]'))
    add(site, "zeta", IMPLEMENTATION.replace("(metrics)", "()").format("'no arguments'"))
    result = house().hook("twinkle_step_end")(metrics={"loss": 0.5})
    assert result.results == {"acme": 0.5, "zeta": "no arguments"}
    assert result.errors == {}


def test_a_module_is_imported_when_a_hook_it_declares_first_fires(site: Any, house: House) -> None:
    add(site, "acme", IMPLEMENTATION.format(1))
    add(site, "other", "raise RuntimeError('imported')", implements="twinkle_run_end")
    registry = house()
    hook = registry.hook("twinkle_step_end")
    assert "acme.hooks" not in sys.modules
    assert hook(metrics={}).results == {"acme": 1}
    assert "acme.hooks" in sys.modules
    assert "other.hooks" not in sys.modules
    assert repr(hook) == "<hook twinkle_step_end(metrics)>"
    assert registry.hook("twinkle_step_end") is hook
    assert registry.lifecycle_hooks == ["twinkle_run_end", "twinkle_step_end"]


def test_a_plugin_added_later_takes_part(site: Any, house: House) -> None:
    registry = house()
    hook = registry.hook("twinkle_step_end")
    assert hook(metrics={}).results == {}
    add(site, "acme", IMPLEMENTATION.format(1))
    registry.load_installed()
    assert hook(metrics={}).results == {"acme": 1}


def test_an_error_is_logged_with_its_plugin_and_reaches_nobody(
    site: Any, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    add(site, "acme", IMPLEMENTATION.format("1 / 0"))
    add(site, "zeta", IMPLEMENTATION.format(1))
    hook = house().hook("twinkle_step_end")
    with caplog.at_level(logging.ERROR, "twinkle"):
        result = hook(metrics={})
        hook(metrics={})
    assert result.results == {"zeta": 1}
    assert isinstance(result.errors["acme"], ZeroDivisionError)
    text = "twinkle_step_end: plugin acme raised ZeroDivisionError: division by zero"
    assert [record.getMessage() for record in caplog.records] == [text, text]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


def test_a_keyboard_interrupt_is_not_an_error_of_a_plugin(site: Any, house: House) -> None:
    add(site, "acme", IMPLEMENTATION.replace("return {}", "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        house().hook("twinkle_step_end")(metrics={})


def test_an_unknown_hook_names_the_nearest(house: House) -> None:
    with pytest.raises(
        ComponentNotFound, match="there is no lifecycle hook 'twinkle_step_ends'; nearest: 'twinkle_step_end'"
    ):
        house().hook("twinkle_step_ends")
    with pytest.raises(ComponentNotFound, match="there is no lifecycle hook 'twinkle_loss'"):
        house().hook("twinkle_loss")


def test_the_keywords_of_a_call_are_those_of_the_spec(house: House) -> None:
    hook = house().hook("twinkle_step_end")
    with pytest.raises(ArgumentError, match="hook twinkle_step_end: unknown argument 'metric'; nearest: 'metrics'"):
        hook(metric={})
    with pytest.raises(ArgumentError, match="hook twinkle_step_end: missing argument 'metrics'"):
        hook()


@pytest.mark.parametrize(
    ("source", "implements", "message"),
    [
        (
            "import flash_foo",
            "twinkle_step_end",
            "hooks of plugin acme: importing acme.hooks failed: it needs the module 'flash_foo'",
        ),
        ("raise OSError('x')", "twinkle_step_end", "hooks of plugin acme: importing acme.hooks failed: OSError: x"),
        (
            IMPLEMENTATION.format(1),
            '"twinkle_step_end", "twinkle_run_end"',
            "acme.hooks of plugin acme implements 'twinkle_step_end', "
            "its manifest declares 'twinkle_run_end', 'twinkle_step_end'; correct `hooks.implements`",
        ),
        ("x = 1", "twinkle_step_end", "implements nothing, its manifest declares 'twinkle_step_end'"),
        (
            IMPLEMENTATION.format(1) + "@hookimpl\ndef twinkle_run_end(run): ...\n",
            "twinkle_step_end",
            "implements 'twinkle_run_end', 'twinkle_step_end', its manifest declares 'twinkle_step_end'",
        ),
        (
            IMPLEMENTATION.replace("metrics", "metrik").format(1),
            "twinkle_step_end",
            "{'metrik'} are declared in the hookimpl but can not be found in the hookspec; "
            "the hooks are twinkle_step_end(metrics)",
        ),
        (
            IMPLEMENTATION.replace("@hookimpl", "@hookimpl(wrapper=True)").format("(yield)"),
            "twinkle_step_end",
            "plugin acme: 'twinkle_step_end' are wrappers; a lifecycle hook must be a plain function",
        ),
    ],
)
def test_a_hooks_module_that_is_not_as_declared_breaks_its_plugin(
    site: Any,
    house: House,
    table: Any,
    loss_source: str,
    caplog: pytest.LogCaptureFixture,
    source: str,
    implements: str,
    message: str,
) -> None:
    add(site, "acme", source, implements, table("L", "acme.loss:PlainLoss"))
    site.write("acme/loss.py", loss_source)
    add(site, "zeta", IMPLEMENTATION.format(1))
    registry = house()
    assert registry.names("loss") == ["L"]
    hook = registry.hook("twinkle_step_end")
    result = hook(metrics={})
    assert result.results == {"zeta": 1}
    assert isinstance(result.errors["acme"], PluginBroken)
    assert message in str(result.errors["acme"])
    assert "twinkle_step_end: plugin acme cannot be loaded" in caplog.text
    assert (registry.records[0].status, registry.records[0].reason) == ("broken", str(result.errors["acme"]))
    assert hook(metrics={}).errors == {}
    with pytest.raises(PluginBroken, match="plugin acme offers it but is broken"):
        registry.find("L", "loss")
    assert registry.names("loss") == []


class Tracker:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @property
    def expensive(self) -> None:
        raise AssertionError("a property of a live object was evaluated")

    @hookimpl
    def twinkle_step_end(self, metrics: Any) -> int:
        self.seen.append(metrics)
        return len(self.seen)


def test_a_live_object_takes_part_until_it_is_detached(site: Any, house: House) -> None:
    add(site, "acme", IMPLEMENTATION.format(1))
    registry = house()
    tracker = Tracker()
    registry.attach(tracker, "csv")
    hook = registry.hook("twinkle_step_end")
    assert hook(metrics={"loss": 1}).results == {"acme": 1, "csv": 1}
    registry.attach(Tracker(), "second")
    assert set(hook(metrics={"loss": 2}).results) == {"acme", "csv", "second"}
    registry.detach("csv")
    registry.detach("second")
    assert hook(metrics={"loss": 3}).results == {"acme": 1}
    assert tracker.seen == [{"loss": 1}, {"loss": 2}]
    registry.attach(tracker, "csv")
    assert hook(metrics={}).results["csv"] == 3


def test_one_object_may_be_attached_under_two_names(house: House) -> None:
    registry = house()
    tracker = Tracker()
    registry.attach(tracker, "a")
    registry.attach(tracker, "b")
    registry.hook("twinkle_step_end")(metrics={})
    assert len(tracker.seen) == 2


def test_what_cannot_be_attached_says_why(house: House) -> None:
    registry = house()
    registry.attach(Tracker(), "csv")
    with pytest.raises(
        ComponentConflict, match="cannot attach 'csv': an object of that name is attached already; detach it first"
    ):
        registry.attach(Tracker(), "csv")
    with pytest.raises(
        ComponentTypeError, match="'x': object has no method marked with @hookimpl; hooks are 'twinkle_run_end'"
    ):
        registry.attach(object(), "x")
    with pytest.raises(ComponentNotFound, match="cannot detach 'x': no object of that name is attached"):
        registry.detach("x")

    class Misspelt:
        @hookimpl
        def twinkle_step_ended(self, metrics: Any) -> None: ...

    class Twice:
        @hookimpl
        def twinkle_step_end(self, metrics: Any) -> None: ...
        @hookimpl(specname="twinkle_step_end")
        def another(self, metrics: Any) -> None: ...

    class Wrong:
        @hookimpl
        def twinkle_step_end(self, metrik: Any) -> None: ...

    with pytest.raises(
        ComponentTypeError, match="there is no lifecycle hook 'twinkle_step_ended'; nearest: 'twinkle_step_end'"
    ):
        registry.attach(Misspelt(), "x")
    with pytest.raises(ComponentTypeError, match=r"the hooks are twinkle_step_end\(metrics\)"):
        registry.attach(Wrong(), "x")
    with pytest.raises(ComponentTypeError, match="implements twinkle_step_end twice; the second is 'twinkle_step_end'"):
        registry.attach(Twice(), "x")
    registry.attach(Tracker(), "x")


def test_a_live_object_does_not_take_the_name_of_a_plugin(site: Any, house: House) -> None:
    add(site, "acme", IMPLEMENTATION.format(1))
    with pytest.raises(ComponentConflict, match="cannot attach 'acme': it is the name of a plugin; use another name"):
        house().attach(Tracker(), "acme")


def test_a_whole_plugin_may_follow_a_broken_one_of_its_name(site: Any, house: House, table: Any) -> None:
    add(site, "acme", "raise OSError", more=table("L", "acme.m:L"))
    registry = house()
    assert registry.names("loss") == ["L"]
    registry.hook("twinkle_step_end")(metrics={})
    manifest = site.plugin("zeta", table("Z", "zeta.m:Z"))
    manifest.write_text(manifest.read_text().replace('name = "zeta"', 'name = "acme"'))
    registry.load_installed()
    assert registry.names("loss") == ["Z"]


def test_threads_that_race_import_and_call_each_plugin_once_a_call(site: Any, house: House, table: Any) -> None:
    add(site, "acme", "import time; time.sleep(0.05)\n" + IMPLEMENTATION.format(1), more=table("L", "acme.m:L"))
    registry = house()
    results: list[Any] = []

    def work() -> None:
        registry.load_installed()
        assert registry.names("loss") == ["L"]
        results.append(registry.hook("twinkle_step_end")(metrics={}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(r.results, r.errors) for r in results] == [({"acme": 1}, {})] * 8
    assert len(registry.records) == 1


def test_an_import_that_asks_the_registry_from_another_thread_does_not_deadlock(
    site: Any, house: House, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import threading, house_registry
found = []
thread = threading.Thread(target=lambda: found.append(house_registry.registry.names("loss")))
thread.start()
thread.join(10)
class L: ...
"""
    site.plugin("acme", table("L", "acme.m:L", kind="optimizer") + table("K", "acme.m:K"), m=source)
    registry = house()
    holder: Any = type(sys)("house_registry")
    holder.registry = registry
    monkeypatch.setitem(sys.modules, "house_registry", holder)
    registry.resolve("L", "optimizer")
    assert sys.modules["acme.m"].found == [["K"]]

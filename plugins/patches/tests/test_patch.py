"""Patches: applied once, undone exactly, recorded by symbol, refused where they clash or do not know a version."""

import copy
import gc
import importlib.metadata
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from twinkle.errors import ArgumentError, ComponentTypeError, PatchError
from twinkle.patch import Patch, applied_patches, apply_context, apply_patch, is_applied, undo_patch


class Thing:
    """Something to patch."""

    size = 1

    def speak(self) -> str:
        return "a"


class Louder(Patch):
    def __call__(self, module: Any, mark: str = "!") -> Any:
        self.wrap(module, "speak", lambda original: original() + mark)
        return module


class Bigger(Patch):
    def __init__(self, size: int = 2) -> None:
        self.size = size

    def __call__(self, module: Any) -> Any:
        self.replace(module, "size", self.size)
        return module


class Shouter(Patch):
    def __call__(self, module: Any) -> Any:
        self.replace(module, "speak", lambda: "A")
        return module


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Any:
    yield
    if applied_patches():
        gc.collect(1)  # a whole collection takes long, and is seldom needed
    if applied_patches():
        gc.collect()
    assert applied_patches() == []


def test_a_patch_is_applied_and_undone() -> None:
    thing = Thing()
    assert apply_patch(thing, Louder) is thing
    assert thing.speak() == "a!"
    assert Thing().speak() == "a"
    assert is_applied(thing, Louder)
    assert not is_applied(Thing(), Louder)
    undo_patch(thing, Louder)
    assert not is_applied(thing, Louder)
    assert thing.speak() == "a"
    assert vars(thing) == {}


def test_applying_twice_is_applying_once() -> None:
    thing = Thing()
    apply_patch(thing, Louder)
    assert apply_patch(thing, Louder) is thing
    assert thing.speak() == "a!"
    undo_patch(thing, Louder)
    assert thing.speak() == "a"


@pytest.mark.parametrize("again", [lambda t: apply_patch(t, Louder, mark="?"), lambda t: apply_patch(t, Louder, "?")])
def test_other_arguments_are_refused_until_it_is_undone(again: Any) -> None:
    thing = Thing()
    apply_patch(thing, Louder)
    with pytest.raises(PatchError, match=r"Louder is applied to this Thing already, with other arguments; undo that"):
        again(thing)
    assert thing.speak() == "a!"
    undo_patch(thing, Louder)
    again(thing)
    assert thing.speak() == "a?"


def test_other_settings_are_other_arguments_too() -> None:
    thing = Thing()
    apply_patch(thing, Bigger(3))
    apply_patch(thing, Bigger(3))
    with pytest.raises(PatchError, match="other arguments"):
        apply_patch(thing, Bigger(4))


def test_calling_a_patch_oneself_is_the_same() -> None:
    thing = Thing()
    patch = Louder()
    assert patch(thing) is thing
    Louder()(thing)
    assert thing.speak() == "a!"
    Louder().unpatch(thing)
    assert thing.speak() == "a"


def test_one_object_may_bear_patches_of_several_symbols_undone_in_any_order() -> None:
    thing = Thing()
    apply_patch(thing, Louder)
    apply_patch(thing, Bigger)
    undo_patch(thing, Louder)
    assert (thing.speak(), thing.size) == ("a", 2)
    undo_patch(thing, Bigger)
    assert vars(thing) == {}


def test_two_patches_of_one_symbol_are_an_error_that_names_both() -> None:
    thing = Thing()
    apply_patch(thing, Louder)
    with pytest.raises(PatchError, match=r"Shouter cannot replace Thing\.speak .*which .*:Louder has replaced; .*undo"):
        apply_patch(thing, Shouter)
    assert thing.speak() == "a!"
    apply_patch(Thing(), Shouter)


def test_the_record_says_what_is_patched_by_whom() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    class Scale(Patch):
        def __call__(self, module: Any) -> Any:
            self.wrap(module[1], "forward", lambda original, x: 2 * original(x))
            self.replace(nn.Linear, "in_name", "x", create=True)
            return module

    apply_patch(model, Scale)
    (entry,) = applied_patches()
    assert applied_patches(model) == [entry]
    assert applied_patches(nn.Linear(1, 1)) == []
    assert entry.patch.endswith("test_the_record_says_what_is_patched_by_whom.<locals>.Scale")
    assert entry.target == "Sequential"
    assert entry.symbols == ("Sequential:1.forward (this instance)", "torch.nn.modules.linear.Linear.in_name")
    assert entry.undoable
    undo_patch(model, Scale)
    assert not hasattr(nn.Linear, "in_name")


def test_an_error_in_the_middle_undoes_what_was_done() -> None:
    class Clumsy(Patch):
        def __call__(self, module: Any) -> Any:
            self.replace(module, "size", 5)
            raise ZeroDivisionError

    thing = Thing()
    with pytest.raises(ZeroDivisionError):
        apply_patch(thing, Clumsy)
    assert vars(thing) == {}


class TestBlocks:
    def test_a_block_undoes_also_when_it_raises(self) -> None:
        thing = Thing()
        seen = []

        def run() -> None:
            with apply_context(thing, Louder) as given:
                seen.append((given, thing.speak()))
                raise KeyError

        with pytest.raises(KeyError):
            run()
        assert seen == [(thing, "a!")]
        assert thing.speak() == "a"

    def test_nested_blocks_end_with_the_outer_one(self) -> None:
        thing = Thing()
        with apply_context(thing, Louder):
            with apply_context(thing, Louder):
                assert thing.speak() == "a!"
            assert thing.speak() == "a!"
        assert thing.speak() == "a"

    def test_what_was_applied_for_good_stays(self) -> None:
        thing = Thing()
        apply_patch(thing, Louder)
        with apply_context(thing, Louder):
            pass
        assert thing.speak() == "a!"

    def test_a_patch_that_is_kept_inside_a_block_stays(self) -> None:
        thing = Thing()
        with apply_context(thing, Louder):
            apply_patch(thing, Louder)
        assert thing.speak() == "a!"
        undo_patch(thing, Louder)

    def test_undoing_inside_waits_for_the_block(self) -> None:
        thing = Thing()
        apply_patch(thing, Louder)
        with apply_context(thing, Louder):
            undo_patch(thing, Louder)
            assert thing.speak() == "a!"
            with pytest.raises(PatchError, match="whose end undoes it"):
                undo_patch(thing, Louder)
        assert thing.speak() == "a"

    @pytest.mark.full
    def test_threads_may_overlap(self) -> None:
        thing, seen, barrier = Thing(), [], threading.Barrier(8)

        def run() -> None:
            barrier.wait(10)
            for _ in range(200):
                with apply_context(thing, Louder):
                    seen.append(thing.speak())

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == ["a!"] * 1600
        assert vars(thing) == {}

    def test_a_function_cannot_be_undone(self) -> None:
        thing = Thing()
        with pytest.raises(PatchError, match="is a function, which cannot be undone"), apply_context(thing, len):
            pass

    def test_a_patch_without_a_way_back_is_an_error_at_the_end(self) -> None:
        class Silent(Patch):
            def __call__(self, module: Any) -> None:
                module.size = 3

        thing = Thing()
        with pytest.raises(PatchError, match=r"Silent cannot be undone: .* no unpatch"), apply_context(thing, Silent):
            pass
        assert not applied_patches(thing)[0].undoable


class TestForeign:
    """Patches that know nothing of `replace`, as community repositories have them."""

    class Old(Patch):
        def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.before = module.size
            module.size = module.size + 1

        def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
            module.size = self.before

    def test_they_are_applied_once_and_undone_by_their_own_means(self) -> None:
        thing = Thing()
        apply_patch(thing, self.Old)
        apply_patch(thing, self.Old)
        assert thing.size == 2
        undo_patch(thing, self.Old)
        assert thing.size == 1

    def test_undoing_directly_reaches_the_record_too(self) -> None:
        thing, patch = Thing(), self.Old()
        patch(thing)
        patch.unpatch(thing)
        assert thing.size == 1
        with pytest.raises(PatchError, match=r"Old is not applied to this Thing; no patch is"):
            patch.unpatch(thing)

    def test_a_function_is_a_patch(self) -> None:
        def enlarge(module: Any, by: int) -> str:
            module.size += by
            return "done"

        thing = Thing()
        assert apply_patch(thing, enlarge, by=2) == "done"
        assert apply_patch(thing, enlarge, by=2) == "done"
        assert thing.size == 3


class TestOthers:
    def test_a_value_that_somebody_else_has_set_stays_and_is_named(self) -> None:
        thing = Thing()
        apply_patch(thing, Louder)
        apply_patch(thing, Bigger)
        thing.size = 9
        with pytest.raises(PatchError, match=r"undone but for Thing\.size .* somebody has set that since"):
            undo_patch(thing, Bigger)
        assert thing.size == 9
        undo_patch(thing, Louder)
        assert applied_patches() == []

    def test_a_symbol_of_a_class_is_shared_by_all_that_the_patch_is_applied_to(self) -> None:
        class All(Patch):
            def __call__(self, module: Any) -> Any:
                self.replace(Thing, "size", 8)

        first, second = Thing(), Thing()
        apply_patch(first, All)
        apply_patch(second, All)
        undo_patch(first, All)
        assert Thing.size == 8
        undo_patch(second, All)
        assert Thing.size == 1

    def test_a_patch_ends_with_the_object_that_it_was_applied_to(self) -> None:
        class All(Patch):
            def __call__(self, module: Any) -> Any:
                self.replace(Thing, "size", 8)
                self.wrap(module, "speak", lambda original: "b")

        thing = Thing()
        apply_patch(thing, All)
        gone = weakref.ref(thing)
        del thing
        gc.collect()
        assert gone() is None
        assert applied_patches() == []
        assert Thing.size == 1

    def test_a_deep_copy_runs_its_own_method_and_is_not_patched_again(self) -> None:
        class Net(nn.Linear):
            pass

        class Negate(Patch):
            def __call__(self, module: Any) -> Any:
                self.wrap(module, "forward", lambda original, x: -original(x))

        net = Net(1, 1, bias=False)
        apply_patch(net, Negate)
        other = copy.deepcopy(net)
        with torch.no_grad():
            net.weight.fill_(1)
            other.weight.fill_(2)
        assert other(torch.ones(1)).item() == -2
        with pytest.raises(PatchError, match="copy of a patched one"):
            apply_patch(other, Negate)

    def test_a_patch_made_of_patches_begins_and_ends_with_them(self) -> None:
        class Both(Patch):
            def __call__(self, module: Any, fail: bool = False) -> Any:
                apply_patch(module, Louder)
                apply_patch(module, Bigger)
                if fail:
                    raise ZeroDivisionError

        thing = Thing()
        with apply_context(thing, Both):
            assert (thing.speak(), thing.size) == ("a!", 2)
        assert vars(thing) == {}
        with pytest.raises(ZeroDivisionError):
            apply_patch(thing, Both, fail=True)
        assert vars(thing) == {}
        apply_patch(thing, Louder)
        apply_patch(thing, Both)
        undo_patch(thing, Both)
        assert (thing.speak(), thing.size) == ("a!", 1)


class TestArguments:
    def test_an_unknown_keyword_is_an_error_and_nothing_is_patched(self) -> None:
        thing = Thing()
        with pytest.raises(ArgumentError, match=r"patch 'Louder': unknown argument 'marc', nearest: 'mark'"):
            apply_patch(thing, Louder, marc="?")
        with pytest.raises(ArgumentError, match="unknown argument"), apply_context(thing, Louder, marc="?"):
            pass
        assert thing.speak() == "a"

    def test_undoing_what_is_not_applied_names_what_is(self) -> None:
        thing = Thing()
        apply_patch(thing, Bigger)
        with pytest.raises(PatchError, match=r"Louder is not applied to this Thing; applied to it: .*:Bigger"):
            undo_patch(thing, Louder)

    def test_a_patch_must_define_its_call(self) -> None:
        with pytest.raises(NotImplementedError, match="must define __call__"):
            apply_patch(Thing(), Patch)


class TestVersions:
    def patch(self, versions: Any, otherwise: str = "") -> type[Patch]:
        return type("Guarded", (Louder,), {"versions": versions, "otherwise": otherwise})

    @pytest.mark.parametrize("installed", ["5.0", "5.23.0", "5.99.1.dev0"])
    def test_a_known_version_is_fine(self, installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
        with apply_context(Thing(), self.patch({"transformers": ">=5.0,<6"})) as thing:
            assert thing.speak() == "a!"

    @pytest.mark.parametrize("installed", ["4.57.1", "6.0"])
    def test_an_unknown_one_is_refused_before_anything_is_touched(
        self, installed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
        thing = Thing()
        message = rf"Guarded is for transformers >=5\.0,<6 \(installed: {installed}\); leave the patch out, or take"
        with pytest.raises(PatchError, match=message):
            apply_patch(thing, self.patch({"transformers": ">=5.0,<6"}))
        assert thing.speak() == "a"

    def test_the_author_may_say_what_to_do_instead(self) -> None:
        with pytest.raises(PatchError, match=r"\(installed: [\d.+a-z]+\); use the door"):
            apply_patch(Thing(), self.patch({"torch": "<1"}, "use the door"))

    def test_a_library_that_is_not_there_is_not_known(self) -> None:
        with pytest.raises(PatchError, match=r"nothing-like-this >=1 \(not installed\)"):
            apply_patch(Thing(), self.patch({"nothing-like-this": ">=1"}))

    @pytest.mark.parametrize("versions", [{"torch": "about 2"}, ["torch"], {"torch": 2}])
    def test_a_guard_that_cannot_be_read_is_an_error(self, versions: Any) -> None:
        with pytest.raises(ArgumentError, match=r"write it as \{'transformers': '>=5,<6'\}"):
            apply_patch(Thing(), self.patch(versions))


def _within(module: Any, patch: Any) -> None:
    with apply_context(module, patch):
        pass


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (apply_patch, "apply_patch"),
        (_within, "apply_context"),
        (undo_patch, "undo_patch"),
        (is_applied, "is_applied"),
    ],
)
@pytest.mark.parametrize(("patch", "shown"), [("Louder", "'Louder'"), (Louder, "the patch Louder")])
def test_swapped_arguments_are_said_and_the_model_is_not_printed(
    function: Any, name: str, patch: Any, shown: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        function(patch, nn.Linear(2, 2))
    assert str(caught.value) == (
        f"{name}: the module is {shown} and the patch is of type Linear; are the arguments swapped? "
        f"Write {name}(module, patch)"
    )


def test_what_is_no_patch_is_called_by_its_type() -> None:
    with pytest.raises(ComponentTypeError, match=r"the patch is an instance of torch\.nn\..*Linear, not an instance"):
        apply_patch(Thing(), nn.Linear(2, 2))

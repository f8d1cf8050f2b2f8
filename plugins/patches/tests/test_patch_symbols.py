"""What patches put back: every place in which Python keeps an attribute, and texts that several patches edit."""

import json
import types
from typing import Any

import pytest
import torch
from torch import nn

from twinkle.errors import ArgumentError, PatchError
from twinkle.patch import Patch, apply_context, apply_patch, undo_patch


class Thing:
    """Something to patch."""

    size = 1

    def speak(self) -> str:
        return "a"

    @staticmethod
    def still() -> str:
        return "s"

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


class Louder(Patch):
    def __call__(self, module: Any) -> Any:
        self.wrap(module, "speak", lambda original: original() + "!")
        return module


class TestSymbols:
    """Every place in which Python keeps an attribute gets back the very object that was there."""

    def swap(self, owner: Any, name: str, new: Any, **options: Any) -> None:
        class Swap(Patch):
            def __call__(self, module: Any) -> Any:
                self.replace(owner, name, new, **options)
                return module

        holder = Thing()
        before = dict(vars(owner))
        with apply_context(holder, Swap):
            assert getattr(owner, name) is new or isinstance(owner, type)
        assert {k: id(v) for k, v in vars(owner).items()} == {k: id(v) for k, v in before.items()}
        assert list(vars(owner)) == list(before)

    def test_an_attribute_of_an_instance(self) -> None:
        thing = Thing()
        thing.size = 4
        self.swap(thing, "size", 5)

    def test_an_attribute_that_the_instance_inherits(self) -> None:
        self.swap(Thing(), "size", 5)

    @pytest.mark.parametrize("name", ["speak", "still", "kind", "size"])
    def test_a_member_of_a_class(self, name: str) -> None:
        self.swap(Thing, name, 5)

    def test_a_member_that_a_class_inherits(self) -> None:
        class Child(Thing):
            pass

        self.swap(Child, "speak", 5)
        assert "speak" not in vars(Child)

    def test_a_function_of_a_module(self) -> None:
        self.swap(json, "dumps", repr)

    def test_a_new_attribute(self) -> None:
        self.swap(Thing(), "colour", "red", create=True)

    def test_a_property_with_a_setter(self) -> None:
        class Box:
            __slots__ = ("__weakref__", "_inside")

            def __init__(self) -> None:
                self._inside = [1]

            @property
            def inside(self) -> list[int]:
                return self._inside

            @inside.setter
            def inside(self, value: list[int]) -> None:
                self._inside = value

        class Fill(Patch):
            def __call__(self, module: Any) -> Any:
                self.replace(module, "inside", [2])

        box = Box()
        old = box.inside
        with apply_context(box, Fill):
            assert box.inside == [2]
        assert box.inside is old

    @pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "linear"])
    def test_parameters_buffers_and_parts_of_a_module_keep_their_place(self, name: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
                self.register_buffer("running_mean", torch.zeros(2))
                self.linear, self.last = nn.Linear(2, 2), nn.Identity()

        net = Net()
        new = {"running_mean": torch.ones(2), "linear": nn.Identity()}.get(name, nn.Parameter(torch.full((2,), 7.0)))

        class Swap(Patch):
            def __call__(self, module: Any) -> Any:
                self.replace(module, name, new)

        before = [
            (key, id(value)) for key, value in [*net.named_parameters(), *net.named_children(), *net.named_buffers()]
        ]
        with apply_context(net, Swap):
            assert getattr(net, name) is new
        now = [
            (key, id(value)) for key, value in [*net.named_parameters(), *net.named_children(), *net.named_buffers()]
        ]
        assert now == before

    def test_a_misspelt_symbol_names_the_nearest(self) -> None:
        with pytest.raises(ArgumentError, match=r"no .*Thing\.speek to replace; nearest: 'speak'"):
            self.swap(Thing, "speek", 1)

    def test_what_cannot_be_set_says_so(self) -> None:
        with pytest.raises(ArgumentError, match=r"builtins\.int\.real cannot be replaced: "):
            self.swap(int, "real", 1)

    @pytest.mark.parametrize(("name", "expected"), [("speak", "a?"), ("still", "s?"), ("kind", "Child?")])
    def test_functions_of_a_class_are_wrapped_as_what_they_are(self, name: str, expected: str) -> None:
        class Ask(Patch):
            def __call__(self, module: Any) -> Any:
                self.wrap(Thing, name, lambda original, *args: original(*args) + "?")

        class Child(Thing):
            pass

        child = Child()
        with apply_context(Thing, Ask):
            assert getattr(child, name)() == expected
        assert getattr(child, name)() == expected[:-1]

    def test_a_function_of_a_module_is_wrapped(self) -> None:
        module = types.ModuleType("m")
        module.f = lambda x: x + 1  # type: ignore[attr-defined]

        class Twice(Patch):
            def __call__(self, module: Any) -> Any:
                self.wrap(module, "f", lambda original, x: original(original(x)))

        with apply_context(module, Twice):
            assert module.f(1) == 3
        assert module.f(1) == 2

    def test_what_is_no_function_is_not_wrapped(self) -> None:
        class Odd(Patch):
            def __call__(self, module: Any) -> Any:
                self.wrap(module, "size", lambda original: None)

        with pytest.raises(ArgumentError, match=r"Thing\.size .* is not a function to wrap"):
            apply_patch(Thing(), Odd)

    def test_replace_is_for_the_time_of_applying(self) -> None:
        with pytest.raises(PatchError, match="replaced while it is applied; do so in __call__"):
            Louder().replace(Thing(), "size", 3)


class TestEdits:
    """Patches that edit one symbol, such as a text, go together in any order."""

    class Star(Patch):
        def __call__(self, module: Any) -> Any:
            self.edit(module, "name", lambda text: text + "*")
            return module

    class Dash(Patch):
        def __call__(self, module: Any) -> Any:
            self.edit(module, "name", lambda text: text + "-")
            return module

    class Whole(Patch):
        def __call__(self, module: Any) -> Any:
            self.replace(module, "name", "x")
            return module

    @pytest.fixture
    def named(self) -> Any:
        thing = Thing()
        thing.name = "n"  # type: ignore[attr-defined]
        return thing

    @pytest.mark.parametrize(("first", "left"), [("Star", "n-"), ("Dash", "n*")])
    def test_each_is_undone_alone(self, named: Any, first: str, left: str) -> None:
        old = named.name
        apply_patch(named, self.Star)
        apply_patch(named, self.Dash)
        apply_patch(named, self.Star)
        assert named.name == "n*-"
        undo_patch(named, getattr(self, first))
        assert named.name == left
        undo_patch(named, self.Dash if first == "Star" else self.Star)
        assert named.name is old

    @pytest.mark.parametrize(("first", "second"), [("Star", "Whole"), ("Whole", "Star")])
    def test_an_edit_and_a_replacement_do_not(self, named: Any, first: str, second: str) -> None:
        apply_patch(named, getattr(self, first))
        with pytest.raises(PatchError, match=f"{second} cannot replace .*{first} has replaced"):
            apply_patch(named, getattr(self, second))
        undo_patch(named, getattr(self, first))
        assert named.name == "n"

    def test_a_value_set_in_between_stays(self, named: Any) -> None:
        apply_patch(named, self.Star)
        apply_patch(named, self.Dash)
        named.name = "other"
        with pytest.raises(PatchError, match="somebody has set that since"):
            undo_patch(named, self.Star)
        with pytest.raises(PatchError, match="somebody has set that since"):
            undo_patch(named, self.Dash)
        assert named.name == "other"

    def test_an_edit_that_fails_leaves_everything(self, named: Any) -> None:
        class Bad(Patch):
            def __call__(self, module: Any) -> Any:
                self.edit(module, "name", lambda text: text + 1)

        apply_patch(named, self.Star)
        with pytest.raises(TypeError):
            apply_patch(named, Bad)
        assert named.name == "n*"
        undo_patch(named, self.Star)

    def test_what_is_not_there_is_not_edited(self) -> None:
        with pytest.raises(ArgumentError, match=r"no .*Thing\.name .* to replace"):
            apply_patch(Thing(), self.Star)

"""Contract checks of patches: idempotent, and undone completely, down to object identity."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twinkle_testing.contracts.case import Case, NotApplicable, require
from twinkle_testing.contracts.values import leaves, same, shown

_BOOKKEEPING = ("__abstractmethods__", "__annotations__", "_abc_impl", "__doc__", "__weakref__", "__dict__")


@dataclass(kw_only=True)
class PatchCase(Case):
    """A patch and what it changes.

    Attributes:
        module: returns a fresh object to patch; by default a tiny Llama of transformers.
        arguments: positional arguments of the patch's call.
        options: keyword arguments of the patch's call.
        inputs: keyword arguments of a forward of the module; by default `input_ids`; None if it is not a module.
        same_numbers: whether the patched forward gives the numbers of the unpatched one.
        watch: further objects that it may change (classes, modules of Python), compared before and after.
    """

    kind = "patch"

    module: Callable[[], Any] | None = None
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[], Mapping[str, Any]] | Literal["default"] | None = "default"
    same_numbers: bool | None = None
    watch: Sequence[Any] = ()

    def unfit(self) -> str:
        """Skip the base class, which does nothing."""
        from twinkle.patch import Patch

        base = "it is the base class of patches, and does nothing by itself" if self.component is Patch else ""
        return base or super().unfit()

    def target(self) -> Any:
        """Return a fresh object to patch."""
        if self.module is not None:
            return self.module()
        import torch
        from transformers import AutoModelForCausalLM

        from twinkle_testing.models import tiny_config

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(tiny_config()).eval()

    def forward(self, module: Any) -> list[Any] | None:
        """Return the tensors of a forward, or None without one."""
        import torch

        if self.inputs is None or not callable(module):
            return None
        if callable(self.inputs):
            given = dict(self.inputs())
        else:
            given = {"input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])}
        with torch.no_grad():
            made = module(**given)
        return [
            leaf.clone() for leaf in leaves(dict(made) if isinstance(made, Mapping) else made) if hasattr(leaf, "clone")
        ]

    def apply(self, module: Any, patch: Any) -> Any:
        """Apply the patch."""
        from twinkle.patch import apply_patch

        return apply_patch(module, patch, *self.arguments, **self.options)


@contextlib.contextmanager
def applied(case: PatchCase, module: Any, patch: Any) -> Any:
    """Apply the patch, and undo it at the end of the block, also after an error."""
    from twinkle.patch import undo_patch

    case.apply(module, patch)
    try:
        yield
    finally:
        undo_patch(module, patch)


def undone(case: PatchCase) -> None:
    """Undoing restores the same objects as before: parameters, buffers, forwards and class attributes."""
    module, patch = case.target(), case.build()
    before, numbers = snapshot(case, module), case.forward(module)
    with applied(case, module, patch):
        case.forward(module)
    changes = differences(before, snapshot(case, module))
    require(not changes, f"undoing it did not restore: {', '.join(changes[:8])}")
    require(same(case.forward(module), numbers), "after undoing it the forward gives other numbers")


def changes_something(case: PatchCase) -> None:
    """It changes something."""
    module, patch = case.target(), case.build()
    before = snapshot(case, module)
    with applied(case, module, patch):
        changes = differences(before, snapshot(case, module))
    require(changes, "nothing that the kit can see is changed; name what it changes in watch=[...] of its example")


def twice_is_once(case: PatchCase) -> None:
    """Applying it twice has no further effect, and one undo reverts it."""
    module, patch = case.target(), case.build()
    before = snapshot(case, module)
    with applied(case, module, patch):
        once = snapshot(case, module)
        case.apply(module, patch)
        changes = differences(once, snapshot(case, module))
        require(not changes, f"the second time it changed {', '.join(changes[:8])} again")
    require(not differences(before, snapshot(case, module)), "applied twice and undone once, it is still there")


def again(case: PatchCase) -> None:
    """Applied, undone and applied again, it works as the first time."""
    module, patch, found = case.target(), case.build(), []
    for _ in range(2):
        with applied(case, module, patch):
            found.append(case.forward(module))
    require(same(found[0], found[1]), "the second time the patched forward gives other numbers than the first")


def undone_after_error(case: PatchCase) -> None:
    """In `with apply_context(...)` it is undone also if the block raises."""
    from twinkle.patch import apply_context

    module, patch = case.target(), case.build()
    before = snapshot(case, module)
    with contextlib.suppress(KeyError), apply_context(module, patch, *case.arguments, **case.options):
        raise KeyError("a block that fails")
    changes = differences(before, snapshot(case, module))
    require(not changes, f"a block that raised did not restore: {', '.join(changes[:8])}")


def numbers_kept(case: PatchCase) -> None:
    """If its example requires it, the patched forward gives the numbers of the unpatched one."""
    if case.same_numbers is None:
        raise NotApplicable("its example does not say same_numbers=True or False")
    module, patch = case.target(), case.build()
    before = case.forward(module)
    with applied(case, module, patch):
        after = case.forward(module)
    equal = same(before, after, tolerance=1e-5)
    said = f"its example says same_numbers={case.same_numbers}"
    require(equal == case.same_numbers, f"{said}, and the forward's numbers are {'the same' if equal else 'others'}")


def others_left_alone(case: PatchCase) -> None:
    """It does not change another object's attributes, and undoing it on one object keeps it on another."""
    one, two, patch = case.target(), case.target(), case.build()
    before = _own(two)
    with applied(case, one, patch):
        changes = differences(before, _own(two))
        require(not changes, f"applied to one object it changed another's own {', '.join(changes[:8])}")


CASE = PatchCase
CHECKS = (undone, changes_something, twice_is_once, again, undone_after_error, numbers_kept, others_left_alone)


def snapshot(case: PatchCase, module: Any) -> dict[str, Any]:
    """Return what a patch can change, by name: attributes of all objects, their classes and their Python modules."""
    found = _own(module)
    classes = {cls for part in _parts(module).values() for cls in type(part).__mro__ if cls is not object}
    for cls in classes:
        for name, value in vars(cls).items():
            found[f"{cls.__qualname__}.{name} of {cls.__module__}"] = value
    # A patch may also replace a function of a Python module, such as one for attention.
    for name in {cls.__module__ for cls in classes}:
        for key, value in vars(sys.modules[name]).items() if name in sys.modules and name != "builtins" else ():
            found[f"{name}:{key}"] = value
    for place, thing in enumerate(case.watch):
        for key, value in vars(thing).items():
            found[f"watch[{place}].{key}"] = value
    return {key: value for key, value in found.items() if key.rpartition(".")[2].partition(" ")[0] not in _BOOKKEEPING}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names whose value is a different object; plain values are compared by value."""
    names = sorted({*before, *after})
    return [
        name for name in names if name not in before or name not in after or not _is_same(before[name], after[name])
    ]


def _parts(module: Any) -> dict[str, Any]:
    parts = dict(module.named_modules()) if hasattr(module, "named_modules") else {}
    config = getattr(module, "config", None)
    return parts | {"": module} | ({"config": config} if config is not None else {})


def _own(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, part in _parts(module).items():
        found[f"{path}|class"] = type(part)
        for name, value in getattr(part, "__dict__", {}).items():
            if name in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
                found.update({f"{path}|{name}.{key}": item for key, item in value.items()})
            elif isinstance(value, dict) and name.endswith("_hooks"):
                found[f"{path}|{name}"] = list(value.values())
            else:
                found[f"{path}|{name}"] = value
    return found


def _is_same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(_is_same(a, b) for a, b in zip(one, two, strict=True))
    plain = (str, int, float, bool, type(None), tuple, dict, set, frozenset)
    return type(one) is type(two) and isinstance(one, plain) and shown(one, 10_000) == shown(two, 10_000)

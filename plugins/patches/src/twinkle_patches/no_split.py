"""Sets which blocks of a model are not split when it is distributed over devices."""

from collections.abc import Iterable
from typing import Any, ClassVar

from twinkle.errors import ArgumentError
from twinkle.patch import Patch
from twinkle_patches.models import check_whole, hugging_face
from twinkle_registry.naming import nearest_or_all


class NoSplitModulesPatch(Patch):
    """Replaces a model's `_no_split_modules`: FSDP2 shards by these blocks, `device_map="auto"` keeps each whole.

    For models whose own list lacks a block (a decoder layer of remote code), or names one too large or too small.

    Args:
        module_names: class names of modules of the model, or one of them; may also be given when it is applied.

    Raises:
        ArgumentError: no names, or the model has no module of such a class.
        PatchError: the model is sharded already, too late for this.
    """

    versions: ClassVar[dict[str, str]] = {"transformers": ">=4.40,<6"}
    changes = ("<model>._no_split_modules",)
    needed = "where a model's own list of blocks is wrong, as with remote code, or not the right unit for sharding"

    def __init__(self, module_names: Iterable[str] | str | None = None) -> None:
        self.module_names = None if module_names is None else _names(module_names)

    def __call__(self, module: Any, module_names: Iterable[str] | str | None = None) -> Any:
        """Apply the patch to a transformers model, or to a PEFT model around one, and return `module`."""
        names = self.module_names if module_names is None else _names(module_names)
        if names is None:
            raise ArgumentError("NoSplitModulesPatch needs module_names, for example ['LlamaDecoderLayer']")
        model = hugging_face(module, self)
        check_whole(model, self)
        _check(model, names)
        now = model._no_split_modules
        self.replace(model, "_no_split_modules", sorted(names) if isinstance(now, list) else set(names))
        return module


def _names(given: Iterable[str] | str) -> frozenset[str]:
    names = frozenset([given] if isinstance(given, str) else given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"NoSplitModulesPatch: module_names={given!r}; give class names of modules of the model")
    return names


def _check(model: Any, names: Iterable[str]) -> None:
    classes = {type(part).__name__ for part in model.modules()}
    for name in sorted(names):
        if name not in classes:
            raise ArgumentError(
                f"NoSplitModulesPatch: {type(model).__name__} has no module of class {name!r}; "
                f"{nearest_or_all(name, classes)}"
            )

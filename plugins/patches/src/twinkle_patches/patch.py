"""The base class of patches, with what their authors need to change symbols so that they can be put back."""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

from twinkle.errors import ArgumentError, PatchError
from twinkle_patches import record, slots


class Patch:
    """Changes a module (or a class, a library, a tokenizer) in place, and back.

    A subclass defines `__call__` and changes symbols with `replace`, `wrap` and `edit`; then `unpatch` needs no code,
    applying twice is the same as applying once, another patch of the same symbol is refused, and an error in
    the middle undoes what was done. A patch that changes things by other means defines `unpatch` itself.

    Attributes:
        versions: distributions that it changes, with the versions that its author knows,
            `{"transformers": ">=5.0,<6"}`; on any other it is refused.
        changes: the symbols that it replaces, in words, for `twinkle plugins patches`.
        needed: description of when it is needed.
        otherwise: what to do where another version is installed, in words.
        per_adapter: whether it can be applied to one adapter of a `MultiLoraTransformersModel`, and then changes
            nothing but the embeddings of that adapter's training rows, with a method `change_embeddings(embeddings,
            draw)`: `[T, H]` of one row, and `draw(features)`, numbers in [0, 1) `[T, features]` that depend on the
            adapter's seed, the operation, the row and the position alone. Only such a patch may be `tenant_safe`.
        own_unpatch: whether the class defines `unpatch` itself; set when the class is created.
    """

    versions: ClassVar[Mapping[str, str]] = {}
    changes: ClassVar[tuple[str, ...]] = ()
    needed: ClassVar[str] = ""
    otherwise: ClassVar[str] = ""
    per_adapter: ClassVar[bool] = False
    own_unpatch: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _recorded(cls.__call__)  # type: ignore[method-assign]
        if "unpatch" in vars(cls):
            cls.unpatch = _unrecorded(cls.unpatch)  # type: ignore[method-assign]
        cls.own_unpatch = cls.unpatch is not Patch.unpatch

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Change `module` (a `torch.nn.Module`, or another object that the patch documents) and return it.

        Raises:
            PatchError: it is applied with other arguments, does not know an installed version, or replaces a symbol
                that another patch has.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, module, ...)")

    def unpatch(self, module: Any, *args: Any, **kwargs: Any) -> None:
        """Restore what `__call__` changed, exactly: the old objects themselves.

        Raises:
            PatchError: it is not applied to `module`, or one of its symbols was changed afterwards.
        """
        record.undo(self, module)

    def replace(self, owner: Any, name: str, new: Any, *, create: bool = False) -> None:
        """Set `owner.name` to `new` for as long as the patch is applied; call it in `__call__`.

        The old value is kept alive meanwhile; `new` and `owner` are not.

        Args:
            owner: a module, a class (for all its instances, now and later) or an instance.
            name: the attribute.
            new: its value; for a class, a function or descriptor as in a class body.
            create: the attribute need not be there.

        Raises:
            ArgumentError: there is no such attribute, or it cannot be set.
            PatchError: another patch has replaced it.
        """
        if not create:
            self._must_have(owner, name, "; with create=True it is made")
        record.claim(self, owner, name, new=new)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method or function by one that calls `around(original, *args, **kwargs)`.

        On an instance `original` is the bound method; on a class it is the function, and the instance comes as the
        first of `args`. A deep copy of an instance runs `around` on its own `original`.

        Args:
            owner: a module, a class or an instance.
            name: the function.
            around: what is called instead.

        Raises:
            ArgumentError: there is no such function.
            PatchError: another patch has replaced it, or the object is a copy of a patched one.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            raise ArgumentError(f"{type(self).__name__}: {slots.symbol_of(owner, name)} is not a function to wrap")
        record.claim(self, owner, name, new=_around(owner, name, original, around))

    def edit(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `change(owner.name)`; several patches may edit one symbol, one on top of the other.

        Undoing one of them computes the others' edits again, from the old value on; for texts, tuples and the like.

        Args:
            owner: a module, a class or an instance.
            name: the attribute.
            change: returns a new value without modifying the old one; it is kept alive while the patch is applied.

        Raises:
            ArgumentError: there is no such attribute, or it cannot be set.
            PatchError: another patch has replaced it altogether.
        """
        self._must_have(owner, name)
        record.claim(self, owner, name, edit=change)

    def _must_have(self, owner: Any, name: str, hint: str = "") -> None:
        if not slots.has(owner, name):
            from twinkle_registry.naming import nearest_or_all

            names = [n for n in dir(owner) if not n.startswith("__")]
            raise ArgumentError(
                f"{type(self).__name__}: there is no {slots.symbol_of(owner, name)} to replace; "
                f"{nearest_or_all(name, names)}{hint}"
            )


class Around:
    """A method of an instance with something around it; deep copies of the instance get one of their own."""

    def __init__(self, original: Callable[..., Any], around: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original, self.around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `around` with the original and the arguments."""
        return self.around(self.original, *args, **kwargs)


def _around(owner: Any, name: str, original: Callable[..., Any], around: Callable[..., Any]) -> Any:
    raw = slots.stored(owner, name)
    if isinstance(raw, Around) and not record.is_recorded(owner, name):
        raise PatchError(
            f"{slots.symbol_of(owner, name)} is patched, but not here: this object is a copy of a patched one; undo "
            "the patch before copying"
        )
    if isinstance(owner, ModuleType):
        return _plain(original, around)
    if not isinstance(owner, type):
        return Around(original, around)
    if isinstance(raw, classmethod):
        return classmethod(_plain(raw.__func__, around))
    made = _plain(original, around)
    return staticmethod(made) if isinstance(raw, staticmethod) else made


def _plain(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def _recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make every way of calling a patch go through the record."""

    @functools.wraps(call)
    def apply(self: Patch, module: Any, *args: Any, **kwargs: Any) -> Any:
        if record.is_running(self, module):
            return call(self, module, *args, **kwargs)
        return record.apply(self, module, args, kwargs, keep=True)[1]

    return apply


def _unrecorded(unpatch: Callable[..., None]) -> Callable[..., None]:
    """Make every way of undoing a patch go through the record."""

    @functools.wraps(unpatch)
    def undo(self: Patch, module: Any, *args: Any, **kwargs: Any) -> None:
        if record.is_undoing(self, module):
            unpatch(self, module, *args, **kwargs)
        else:
            record.undo(self, module)

    return undo

"""Puts kernels in place of layers and functions, and back."""

from collections.abc import Mapping
from typing import Any

from twinkle.errors import PatchError
from twinkle.patch import Patch, applications, is_recorded, undo_recorded
from twinkle_kernels.finding import Replacement, layer_class, replacements, torch_module
from twinkle_kernels.forward import KernelForward, kernel_name
from twinkle_kernels.mapping import Key, check_mapping, key_name


class Kernels(Patch):
    """What `kernelize` does, as a patch, so that the record of patches has it.

    Args:
        mapping: kernels requested by this and earlier calls.
        device: what the model computes on, where its parameters do not say so.

    Attributes:
        plan: what that comes to; only while it is applied, because the record keeps a patch and not its model.
    """

    changes = ("the forward of layers, and functions of libraries",)

    def __init__(self, mapping: Mapping[Key, Any], device: str | None) -> None:
        self.mapping, self.device = mapping, device
        self.plan: list[Replacement] = []

    def __call__(self, module: Any) -> Any:
        """Apply the plan that was made for `module`, and return it."""
        for owner, name, kernel in self.plan:
            _check_free(owner, name, kernel)
            self.replace(owner, name, kernel, create=True)
        return module


def kernelize(model: Any, mapping: Mapping[Any, Any] | None = None) -> Any:
    """Put kernels in place of layers of a model and of functions of libraries.

    Layers keep their class, parameters and names: only their `forward` is another, on the instance. Calling it again
    adds to what is there, as `dict.update` does. Where anything fails, all is as before.

    Args:
        model: a `torch.nn.Module`, or a model or sampler of Twinkle around one.
        mapping: from a layer's class (layers of exactly that class) or a dotted path (what an importable module or
            class has under that name, for the whole process) to a kernel: a class, a callable, `hub(...)`, the name
            of a `kernel` component in any form, or a dict of those by device (`cpu`, `cuda`, `npu`, `mps`, `xpu`,
            `default`). None takes `builtin_mapping(model)`.

    Returns:
        `model`.

    Raises:
        ArgumentError: the mapping is malformed, or a path names nothing.
        Unsupported: a kernel does not run on the device of its layer.
        PatchError: a patch, or another kernelized model, has the layer or function.
        RequirementMissing: a package that a kernel needs is not installed.
        NotTrusted: the kernel is code from a hub that is not trusted.
    """
    if mapping is None:
        from twinkle_kernels.builtin import builtin_mapping

        mapping = builtin_mapping(model)
        _warn_unknown(mapping, torch_module(model))
    wanted, target = check_mapping(mapping), torch_module(model)
    before = _inside(target)
    merged = {key: value for a in before for key, value in a.patch.mapping.items()} | wanted
    patch = Kernels(merged, _device_of_all(model))
    patch.plan.extend(replacements(merged, target, patch.device))
    _warn_nothing(wanted, target)
    for application in reversed(before):
        _undo(model, application)
    try:
        _apply(model, target, patch)
    except BaseException:
        for application in before:
            again = application.patch
            again.plan.extend(replacements(again.mapping, application.target(), again.device))
            _apply(model, application.target(), again)
        raise
    return model


def unkernelize(model: Any) -> Any:
    """Put back what `kernelize` replaced in a model or in parts of it; everything is again what it was.

    A deep or unpickled copy of a kernelized model is restored too. Without kernels nothing happens.

    Args:
        model: what `kernelize` was given, or what wraps it now.

    Returns:
        `model`.

    Raises:
        PatchError: somebody has set a replaced forward or function since: that value stays, the rest is restored. Or
            the model is a part of one that was kernelized as a whole.
    """
    target = torch_module(model)
    for application in reversed(_inside(target)):
        _undo(model, application)
    for layer in target.modules():
        if isinstance(layer.__dict__.get("forward"), KernelForward):
            if is_recorded(layer, "forward"):
                raise PatchError(
                    f"unkernelize: this {type(target).__name__} is a part of a model that was kernelized; give that"
                )
            del layer.__dict__["forward"]  # of a copy
    return model


def _check_free(owner: Any, name: str, kernel: Any) -> None:
    """Refuse to replace a forward or function that other code has replaced."""
    if isinstance(kernel, KernelForward):
        there = owner.__dict__.get(name)
        if isinstance(there, KernelForward):
            recorded = is_recorded(owner, name)
            way = "unkernelize that first" if recorded else "call unkernelize on this copy first"
            what = "of another kernelized model" if recorded else "a copy from a kernelized model"
            raise PatchError(f"kernelize: this {type(owner).__name__} is {what} ({there!r}); {way}")
        if there is not None and not is_recorded(owner, name):
            raise PatchError(
                f"kernelize: this {type(owner).__name__} has a forward of its own, {there!r}, which a kernel would "
                "bypass; take it off first, and put it on again afterwards"
            )
    elif any(_has(a, owner, name) for a in _all()) and getattr(owner, name) is not kernel:
        raise PatchError(
            f"kernelize: another model has put {kernel_name(getattr(owner, name))} in place of {name} of "
            f"{getattr(owner, '__name__', owner)}, which is one for the whole process; unkernelize that model first"
        )


def _all() -> list[Any]:
    return [a for a in applications() if isinstance(a.patch, Kernels)]


def _has(application: Any, owner: Any, name: str) -> bool:
    return any(change.owner() is owner and change.name == name for change in application.changes)


def _inside(target: Any) -> list[Any]:
    """Return what was kernelized before: this module, and those that it wraps."""
    parts = {id(module) for module in target.modules()}
    return [a for a in _all() if id(a.target()) in parts]


def _apply(model: Any, target: Any, patch: Kernels) -> None:
    """Apply the patch by the model's own method, if it has one, because it may have to inspect itself again."""
    from twinkle.patch import apply_patch

    if not patch.plan:
        return
    try:
        if torch_module(model) is target and model is not target and hasattr(model, "apply_patch"):
            model.apply_patch(patch)
        else:
            apply_patch(target, patch)
    finally:
        patch.plan.clear()


def _undo(model: Any, application: Any) -> None:
    target = application.target()
    whole = torch_module(model)
    inner = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    if model is not whole and hasattr(model, "undo_patch") and target in (whole, inner):
        model.undo_patch(application.patch)
    else:
        undo_recorded(application.patch, target)


def _device_of_all(model: Any) -> str | None:
    """Return the device that a model of Twinkle computes on; its parameters may still be on another one."""
    from torch import nn

    device = None if isinstance(model, nn.Module) else getattr(model, "device", None)
    return None if device is None else str(getattr(device, "type", device)).partition(":")[0]


def _warn_unknown(mapping: Mapping[Any, Any], target: Any) -> None:
    """Log a message if there is no kernel for any layer of the model."""
    from twinkle.logging import get_logger

    if not mapping:
        names = ", ".join(sorted({layer_class(module).__name__ for module in target.modules()})[:20])
        get_logger().warning(
            "kernelize: nothing is replaced: no layer of %s has a kernel of ours; it has %s; give a mapping",
            *(type(target).__name__, names),
        )


def _warn_nothing(wanted: Mapping[Key, Any], target: Any) -> None:
    """Warn if the model has no layer of a requested class."""
    from twinkle.logging import get_logger

    asked = [key for key in wanted if not isinstance(key, str)]
    there = {layer_class(module) for module in target.modules()}
    if asked and not there.intersection(asked):
        names, found = ", ".join(map(key_name, asked[:8])), ", ".join(sorted(cls.__name__ for cls in there)[:20])
        get_logger().warning("kernelize: %s has no layer of class %s; it has %s", type(target).__name__, names, found)

"""What kernelize does to a model, what it leaves alone, and that unkernelize puts everything back."""

import copy
import io
import json
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinkle.errors import ArgumentError, ComponentNotFound, PatchError, Unsupported
from twinkle.kernel import kernelize, unkernelize
from twinkle.patch import Patch, applied_patches, apply_patch, undo_patch
from twinkle_kernels.mapping import _WARNED

DECODER = "json.decoder.scanstring"


class Scale(nn.Module):
    """A layer with a parameter, a buffer and an attribute."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), factor))
        self.register_buffer("offset", torch.ones(3))
        self.power = 1

    def forward(self, x: Tensor, extra: float = 0.0) -> Tensor:
        return x * self.weight**self.power + self.offset + extra


class Finer(Scale):
    """A subclass, which is another type."""


class Negative(nn.Module):
    """A kernel of a module class, with a helper, a constant and a parameter of the layer."""

    sign = -1

    def forward(self, x: Tensor, extra: float = 0.0) -> Tensor:
        return self.helped(x) * self.weight + extra

    def helped(self, x: Tensor) -> Tensor:
        return self.sign * x


class Louder(Scale):
    """A kernel that calls the layer's own forward."""

    def forward(self, x: Tensor, extra: float = 0.0) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, extra) * 10


class Called:
    """A kernel that is built and called with the layer."""

    def __call__(self, layer: Any, x: Tensor, extra: float = 0.0) -> Tensor:
        return x - layer.weight + extra


class ForCuda(nn.Module):
    """A kernel for another device than these tests have."""

    devices = ("cuda",)

    def forward(self, x: Tensor) -> Tensor:
        return x


X = torch.tensor([1.0, 2.0, 3.0])


def model() -> Any:
    return nn.ModuleDict({"one": Scale(2.0), "two": Scale(3.0), "finer": Finer(5.0)})


def state(module: nn.Module) -> Any:
    return [(name, dict(part.__dict__), type(part)) for name, part in module.named_modules()]


def test_layers_of_exactly_that_class_get_the_forward_of_the_kernel() -> None:
    found = model()
    assert kernelize(found, {Scale: Negative}) is found
    assert torch.equal(found["one"](X), -2 * X)
    assert torch.equal(found["two"](X, extra=1.0), -3 * X + 1)
    assert torch.equal(found["finer"](X), 5 * X + 1)
    unkernelize(found)
    assert torch.equal(found["one"](X), 2 * X + 1)


def test_classes_names_parameters_and_hooks_stay_what_they_are() -> None:
    found = model()
    before, keys = list(found.parameters()), list(found.state_dict())
    seen = []
    found["one"].register_forward_hook(lambda *_: seen.append(1))
    kernelize(found, {Scale: Negative})
    assert type(found["one"]) is Scale
    assert all(one is other for one, other in zip(found.parameters(), before, strict=True))
    assert list(found.state_dict()) == keys
    found["one"](X).sum().backward()
    assert seen == [1]
    assert torch.equal(found["one"].weight.grad, -X)
    unkernelize(found)


def test_a_kernel_sees_the_parameters_that_the_layer_has_at_that_moment() -> None:
    found = model()
    kernelize(found, {Scale: Negative})
    found["one"].weight = nn.Parameter(torch.full((3,), 7.0))
    assert torch.equal(found["one"](X), -7 * X)
    found.to(torch.float64)
    assert found["one"](X.double()).dtype == torch.float64
    unkernelize(found)


def test_a_kernel_may_call_the_layers_own_forward_and_set_its_attributes() -> None:
    found = model()
    kernelize(found, {Scale: Louder})
    assert torch.equal(found["one"](X), (2 * X + 1) * 10)
    assert found["one"].calls == 1
    unkernelize(found)


@pytest.mark.parametrize(
    "kernel", [Called, Called(), lambda layer, x: x - layer.weight], ids=["class", "object", "function"]
)
def test_what_is_called_gets_the_layer_first(kernel: Any) -> None:
    found = model()
    kernelize(found, {Scale: kernel})
    assert torch.equal(found["two"](X), X - 3)
    unkernelize(found)


def test_undoing_leaves_no_trace() -> None:
    found = model()
    before = state(found)
    kernelize(found, {Scale: Negative, DECODER: lambda *args: ("", 0)})
    unkernelize(found)
    assert state(found) == before
    unkernelize(found)
    assert state(found) == before
    assert json.loads('"x"') == "x"


def test_later_mappings_are_added_as_dict_update_adds() -> None:
    found = model()
    kernelize(found, {Scale: Negative, Finer: Negative})
    kernelize(found, {Scale: Called})
    assert torch.equal(found["one"](X), X - 2)
    assert torch.equal(found["finer"](X), -5 * X)
    assert len(applied_patches()) == 1
    unkernelize(found)
    assert torch.equal(found["finer"](X), 5 * X + 1)


def test_a_part_and_then_the_whole_are_undone_together() -> None:
    found = model()
    kernelize(found["one"], {Scale: Called})
    assert torch.equal(found["two"](X), 3 * X + 1)
    kernelize(found, {Finer: Negative})
    assert torch.equal(found["one"](X), X - 2)
    with pytest.raises(PatchError, match="part of a model that was kernelized"):
        unkernelize(found["one"])
    unkernelize(found)
    assert torch.equal(found["one"](X), 2 * X + 1)


def test_a_failing_call_changes_nothing() -> None:
    found = model()
    kernelize(found, {Scale: Negative})
    before = state(found)
    with pytest.raises(ArgumentError, match="scanstrin"):
        kernelize(found, {Scale: Called, "json.decoder.scanstrin": len})
    assert state(found) == before
    found["finer"].forward = lambda x: x
    with pytest.raises(PatchError, match="a forward of its own"):
        kernelize(found, {Scale: Called, Finer: Called})
    assert torch.equal(found["one"](X), -2 * X)
    unkernelize(found)


def test_a_dotted_path_is_replaced_for_the_process_until_the_last_model_lets_go() -> None:
    def reads(text: str, end: int, strict: bool = True) -> tuple[str, int]:
        return "kernel", text.index('"', end) + 1

    first, second = model(), model()
    kernelize(first, {DECODER: reads})
    kernelize(second, {DECODER: reads})
    assert json.decoder.scanstring is reads
    with pytest.raises(PatchError, match="one for the whole process"):
        kernelize(model(), {DECODER: lambda *args: ("", 0)})
    unkernelize(first)
    assert json.decoder.scanstring is reads
    unkernelize(second)
    assert json.decoder.scanstring is not reads


def test_a_class_of_a_library_is_replaced_by_a_class_alone() -> None:
    found, own = model(), json.JSONDecoder
    with pytest.raises(ArgumentError, match=r"json\.JSONDecoder is a class, and .* is not"):
        kernelize(found, {"json.JSONDecoder": len})
    with pytest.raises(ArgumentError, match="scanstring is a function, and Negative is not"):
        kernelize(found, {DECODER: Negative})
    kernelize(found, {"json.JSONDecoder": Called})
    assert json.JSONDecoder is Called
    unkernelize(found)
    assert json.JSONDecoder is own


def test_a_method_of_a_class_is_replaced_for_all_instances() -> None:
    found, decoder = model(), json.JSONDecoder()
    kernelize(found, {"json.JSONDecoder.decode": lambda self, text: type(self).__name__ + text})
    assert decoder.decode("!") == "JSONDecoder!"
    unkernelize(found)
    assert decoder.decode("1") == 1


def test_the_kernel_of_the_device_is_taken_or_the_default() -> None:
    found = model()
    kernelize(found, {Scale: {"cuda": Negative, "cpu": Called}, Finer: {"cuda": Called, "default": Negative}})
    assert torch.equal(found["one"](X), X - 2)
    assert torch.equal(found["finer"](X), -5 * X)
    unkernelize(found)


def test_without_a_kernel_for_the_device_the_layer_stays_and_that_is_said_once(caplog: Any) -> None:
    _WARNED.clear()
    found = model()
    for _ in range(2):
        kernelize(found, {Scale: {"cuda": ForCuda, "npu": ForCuda}})
    assert torch.equal(found["one"](X), 2 * X + 1)
    assert [r.getMessage() for r in caplog.records] == [
        "kernelize: Scale is unchanged: there is no kernel for cpu, only for cuda, npu"
    ]
    unkernelize(found)


def test_none_for_a_device_leaves_the_layer_without_a_word(caplog: Any) -> None:
    found = model()
    kernelize(found, {Scale: {"cpu": None, "default": ForCuda}})
    assert torch.equal(found["one"](X), 2 * X + 1)
    assert not caplog.records


def test_without_memory_the_device_of_this_process_counts() -> None:
    with torch.device("meta"):
        found = model()
    kernelize(found, {Scale: {"cpu": Negative}})
    found.to_empty(device="cpu")
    nn.init.ones_(found["one"].weight)
    assert torch.equal(found["one"](X), -X)
    unkernelize(found)


def test_a_class_that_no_layer_has_is_warned_of(caplog: Any) -> None:
    found = model()
    kernelize(found, {nn.Linear: Negative})
    assert "ModuleDict has no layer of class Linear; it has Finer, ModuleDict, Scale" in caplog.text
    unkernelize(found)


def test_a_model_for_which_the_house_has_no_kernel_is_warned_of(caplog: Any) -> None:
    kernelize(model())
    assert "nothing is replaced: no layer of ModuleDict has a kernel of ours; it has Finer" in caplog.text
    assert applied_patches() == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), "torch"])
def test_a_copy_is_kernelized_on_its_own_and_restored_on_its_own(copied: Any) -> None:
    found = model()
    kernelize(found, {Scale: Negative})
    if copied == "torch":
        file = io.BytesIO()
        torch.save(found, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        twin = copied(found)
    with torch.no_grad():
        twin["one"].weight.fill_(11.0)
    assert torch.equal(twin["one"](X), -11 * X)
    assert torch.equal(found["one"](X), -2 * X)
    with pytest.raises(PatchError, match="call unkernelize on this copy first"):
        kernelize(twin, {Scale: Called})
    unkernelize(twin)
    assert torch.equal(twin["one"](X), 11 * X + 1)
    assert torch.equal(found["one"](X), -2 * X)
    unkernelize(found)


def test_it_is_in_the_record_of_patches_and_a_patch_of_the_same_forward_is_refused() -> None:
    class Silence(Patch):
        def __call__(self, module: Any) -> Any:
            self.replace(module["one"], "forward", lambda x: x, create=True)
            return module

    found = model()
    kernelize(found, {Scale: Negative})
    assert applied_patches(found)[0].symbols == (
        "ModuleDict:one.forward (this instance)", "ModuleDict:two.forward (this instance)",
    )  # fmt: skip
    with pytest.raises(PatchError, match="Kernels has replaced"):
        apply_patch(found, Silence)
    unkernelize(found)
    apply_patch(found, Silence)
    with pytest.raises(PatchError, match="Silence has replaced"):
        kernelize(found, {Scale: Negative})
    undo_patch(found, Silence)


def test_what_somebody_has_set_since_stays_and_is_told() -> None:
    found = model()
    kernelize(found, {Scale: Negative})
    found["one"].forward = lambda x: x
    with pytest.raises(PatchError, match=r"one\.forward"):
        unkernelize(found)
    assert torch.equal(found["one"](X), X)
    assert torch.equal(found["two"](X), 3 * X + 1)


def test_a_model_is_freed_with_its_last_user() -> None:
    import gc

    gc.collect()
    gc.disable()  # a cycle would keep the memory of a model until the next collection
    try:
        found = model()
        kernelize(found, {Scale: Negative, Finer: Called})
        gone = [weakref.ref(part) for part in (found, found["one"], found["finer"].weight)]
        forward = found["one"].forward
        del found
        assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="Negative computes is gone"):
        forward(X)


def test_a_layer_that_fsdp2_has_given_a_class_of_its_own_is_still_of_its_class() -> None:
    from torch.distributed.fsdp import FSDPModule

    found = nn.Sequential(Scale(2.0))
    found[0].__class__ = type("FSDPScale", (FSDPModule, Scale), {})
    kernelize(found, {Scale: Negative})
    assert torch.equal(found[0](X), -2 * X)
    unkernelize(found)


def test_the_signature_of_the_forward_is_the_layers() -> None:
    import inspect

    found = model()
    kernelize(found, {Scale: lambda *args: args})
    assert list(inspect.signature(found["one"].forward).parameters) == ["x", "extra"]
    assert repr(found["one"].forward).startswith("<forward of Scale by ")
    unkernelize(found)


@pytest.mark.full
def test_compiled_models_run_their_kernels() -> None:
    found = model()
    kernelize(found, {Scale: Negative, Finer: Called})
    compiled = torch.compile(lambda x: found["finer"](found["one"](x)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), -2 * X - 5)
    unkernelize(found)


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ([Scale], "give a dict"),
        ({"forward": Negative}, "not a dotted path"),
        ({"a b.c": Negative}, "not a dotted path"),
        ({3: Negative}, "neither a torch.nn.Module class nor a dotted path"),
        ({Called: Negative}, "neither a torch.nn.Module class nor a dotted path"),
        ({Scale: {}}, "names no device"),
        ({Scale: {"gpu": Negative}}, "'gpu' is not a device"),
        ({Scale: 3}, "3 is no kernel"),
        ({Scale: {"cpu": {"cpu": Negative}}}, "is no kernel"),
        ({Scale: object}, "neither a torch.nn.Module class nor defines __call__"),
        ({"nowhere.function": len}, "no module 'nowhere'"),
        ({"json.decoder.scanstrin": len}, "nearest: 'scanstring'"),
        ({"json.decoders.x": len}, "json has no 'decoders'; nearest: 'decoder'"),
        ({"twinkle_kernels.finding.Replacement._make": len}, "is a classmethod"),
    ],
)
def test_a_wrong_mapping_says_what_is_wrong(mapping: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        kernelize(model(), mapping)


def test_a_kernel_for_another_device_is_refused() -> None:
    with pytest.raises(Unsupported, match="ForCuda runs on cuda, and this is on cpu"):
        kernelize(model(), {Scale: ForCuda})


def test_a_name_that_no_plugin_offers_is_refused() -> None:
    with pytest.raises(ComponentNotFound, match="RMSNormKernel"):
        kernelize(model(), {Scale: "RMSNormKernl"})


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dict is not a torch\.nn\.Module"):
        kernelize({}, {})

"""Rooms, hook specs and kinds are three views of one list; every public name can be imported."""

import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest

import twinkle
from twinkle import hookspecs
from twinkle._registry import registry
from twinkle.errors import RequirementMissing
from twinkle.kinds import KINDS

SPECS = [name for name in dir(hookspecs) if hasattr(getattr(hookspecs, name), "twinkle_spec")]
CLIENT = ("init_tinker_client", "init_twinkle_client")


def test_every_kind_has_a_hook_spec_and_every_other_spec_is_a_lifecycle_hook() -> None:
    of_kinds = {f"twinkle_{kind}" for kind in KINDS}
    assert of_kinds <= set(SPECS)
    assert set(SPECS) - of_kinds == set(registry().lifecycle_hooks)
    assert list(KINDS) == registry().kinds


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_spec_is_documented_and_typed(name: str) -> None:
    spec = getattr(hookspecs, name)
    assert (inspect.getdoc(spec) or "").endswith(".")
    assert inspect.signature(spec).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_documented_room(kind: str) -> None:
    room = importlib.import_module(f"twinkle.{kind}")
    assert room.__doc__
    exports = registry().exports(f"twinkle.{kind}")
    assert dir(room) == sorted({*registry().names(kind), *exports, *room.__all__.own})


IMPORTED_FAST = ("dataset", "filter", "hub", "preprocessor", "template", "tool")  # the rest imports heavy packages
STARS = [pytest.param(kind, marks=() if kind in IMPORTED_FAST else pytest.mark.full) for kind in KINDS]


@pytest.mark.parametrize("kind", STARS)
def test_import_star_binds_every_name_that_can_be_imported(kind: str) -> None:
    room, bound = importlib.import_module(f"twinkle.{kind}"), {}
    exec(f"from twinkle.{kind} import *", bound)
    for name in filter(str.isidentifier, dir(room)):
        try:
            value = getattr(room, name)
        except RequirementMissing:
            assert name not in bound
        else:
            assert bound[name] is value


def test_import_star_binds_the_names_of_published_scripts() -> None:
    bound: dict[str, Any] = {}
    exec("from twinkle.dataset import *\nfrom twinkle.preprocessor.llm import *\nfrom twinkle.hub import *", bound)
    exec("from twinkle.data_format import *\nfrom twinkle import *", bound)
    assert bound["Dataset"](bound["DatasetMeta"](data=[{"a": 1}]))[0] == {"a": 1}
    assert {"PackingDataset", "GSM8KProcessor", "HubOperation", "HFHub", "MSHub", "Trajectory", "DeviceMesh"} <= set(
        bound
    )


@pytest.mark.parametrize("kind", [kind for kind, found in KINDS.items() if found.contract])
def test_every_contract_stands_in_its_room_and_is_documented(kind: str) -> None:
    module, _, name = KINDS[kind].contract.partition(":")
    assert module == f"twinkle.{kind}"
    contract = registry().contract(kind)
    assert contract is getattr(importlib.import_module(module), name)
    assert contract.__doc__


def test_a_name_that_nobody_offers_is_an_attribute_error_with_the_nearest() -> None:
    room = importlib.import_module("twinkle.runtime")
    with pytest.raises(AttributeError, match="nearest: 'local'"):
        _ = room.locl
    with pytest.raises(ImportError, match="NoSuchLoss"):
        exec("from twinkle.loss import NoSuchLoss")
    assert not hasattr(room, "__no_such_dunder__")


@pytest.mark.parametrize("name", twinkle.__all__)
def test_every_public_name_of_twinkle_is_there(name: str) -> None:
    assert getattr(twinkle, name) is not None
    assert name in dir(twinkle)


def test_the_typed_names_are_the_lazy_ones() -> None:
    source = Path(inspect.getfile(twinkle)).read_text()
    typed = {
        line.split(" as ")[-1] for line in source.splitlines() if line.strip().startswith("from ") and " as " in line
    }
    assert typed == set(twinkle.__all__) - {"__version__", "__release_datetime__"}


def test_everything_can_be_imported_at_once_without_the_client() -> None:
    names: dict[str, Any] = {}
    exec("from twinkle import *", names)
    assert set(twinkle.__all__) <= set(names)
    assert set(dir(twinkle)) == {*twinkle.__all__, *CLIENT}


@pytest.mark.skipif(importlib.util.find_spec("twinkle_client") is not None, reason="the client is installed")
@pytest.mark.parametrize("name", CLIENT)
def test_the_client_is_named_where_it_is_missing(name: str) -> None:
    with pytest.raises(RequirementMissing, match="twinkle-client, which is not available yet"):
        getattr(twinkle, name)


def test_a_name_that_twinkle_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = twinkle.nothing


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("twinkle.preprocessor.llm", ()),
        ("twinkle.preprocessor.base", ("Preprocessor",)),
        ("twinkle.reward.base", ("Reward",)),
        ("twinkle.loss.base", ("Loss",)),
        ("twinkle.metric.base", ("Metric",)),
        ("twinkle.advantage.base", ("Advantage",)),
        ("twinkle_patches.patch", ("Patch",)),
        ("twinkle.patch", ("Patch", "apply_context", "apply_patch")),
        ("twinkle.model.base", ("TwinkleModel",)),
        ("twinkle.sampler.base", ("Sampler",)),
        ("twinkle.module.scheduler", ("CosineWarmupScheduler",)),
        ("twinkle.dataset", ("Dataset", "DatasetMeta")),
        ("twinkle.dataloader", ("DataLoader",)),
        ("twinkle.template", ("Template",)),
        ("twinkle.processor", ("InputProcessor",)),
        ("twinkle.data_format", ("InputFeature", "Message", "SamplingParams", "Trajectory", "pack_value")),
    ],
)
def test_published_deep_paths_import(module: str, names: tuple[str, ...]) -> None:
    found = importlib.import_module(module)
    for name in names:
        assert getattr(found, name) is not None


def core_components() -> list[dict[str, Any]]:
    manifest = Path(inspect.getfile(twinkle)).with_name("twinkle-plugin.toml")
    found: list[dict[str, Any]] = tomllib.loads(manifest.read_text())["component"]
    return found


@pytest.mark.parametrize("component", core_components(), ids=lambda found: f"{found['kind']}-{found['name']}")
def test_every_component_of_core_is_what_its_manifest_says(component: dict[str, Any]) -> None:
    spec = registry().find(f"twinkle-core/{component['name']}", component["kind"])
    assert spec.summary
    found = registry().resolve(spec, component["kind"])
    assert getattr(importlib.import_module(f"twinkle.{component['kind']}"), component["name"]) is found

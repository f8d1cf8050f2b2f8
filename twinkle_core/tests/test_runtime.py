"""The local runtime, `initialize`, and the decorators, which record and change nothing else."""

import inspect
import logging
import os
import pickle
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import twinkle
from twinkle import DeviceGroup, DeviceMesh, find_free_port, remote_class, remote_function
from twinkle._registry import registry
from twinkle.errors import ArgumentError, ComponentNotFound, MeshError, RequirementMissing
from twinkle.notifier import Notifier
from twinkle.runtime import RemoteClass, RemoteFunction, Runtime, RuntimeOptions, current_runtime


@pytest.fixture(autouse=True)
def restored_generators() -> Iterator[None]:
    """Leave the random generators as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@remote_class()
class Component:
    """A component as plugins write them."""

    def __init__(self, size: int, device_mesh: DeviceMesh | None = None, **options: Any) -> None:
        self.size, self.device_mesh, self.options = size, device_mesh, options

    @remote_function(dispatch="slice_dp", collect="mean", timeout=5.0)
    def work(self, rows: list[int]) -> int:
        return sum(rows) * self.size


class Grown(Component):
    """A subclass with a constructor of its own."""

    def __init__(self, extra: str) -> None:
        super().__init__(3)
        self.extra = extra


@remote_class(execute="first")
class First(Component):
    """A subclass that is placed otherwise."""


@remote_class()
class Empty:
    """A class without a constructor."""


@remote_class()
class KeywordOnly:
    """Its mesh can only be given by keyword."""

    def __init__(self, *items: int, device_mesh: DeviceMesh | None = None) -> None:
        self.items, self.device_mesh = items, device_mesh


class Elsewhere(Runtime):
    """A runtime that builds whatever has a group as a stand-in."""

    def __init__(self) -> None:
        self.shut = False

    def initialize(self, options: RuntimeOptions) -> None:
        self.options, self.mesh = options, options.global_device_mesh

    def construct(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return ("stand-in", cls, args, dict(kwargs)) if "remote_group" in kwargs else None

    def placement(self, groups: Sequence[DeviceGroup] = ()) -> str:
        return "elsewhere"

    def shutdown(self) -> None:
        self.shut = True


class Bell(Notifier):
    """A notifier that nobody hears."""

    def __call__(self, message: str) -> None:
        """Do nothing."""

    def to_dict(self) -> dict[str, Any]:
        return {}


def test_initialize_seeds_every_generator() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    twinkle.initialize(seed=7)
    first = numbers()
    assert numbers() != first
    twinkle.initialize(seed=7)
    assert numbers() == first
    twinkle.initialize(seed=8)
    assert numbers() != first


def test_full_determinism_is_torchs() -> None:
    try:
        twinkle.initialize(full_determinism=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", True])
def test_a_seed_that_no_generator_takes_is_refused(seed: Any) -> None:
    with pytest.raises(ArgumentError, match="give a whole number from 0 to 4294967295"):
        twinkle.initialize(seed=seed)


def test_without_a_mesh_all_ranks_are_data_parallel() -> None:
    twinkle.initialize()
    assert current_runtime().mesh == DeviceMesh.from_sizes(dp_size=1)


def test_a_mesh_larger_than_the_world_says_how_to_start() -> None:
    with pytest.raises(MeshError, match=r"fsdp 4 x dp 2 = 8 ranks, but 1 process runs .*torchrun --nproc_per_node=8"):
        twinkle.initialize(global_device_mesh=DeviceMesh.from_sizes(fsdp_size=4, dp_size=2))
    assert current_runtime().mesh is None


def test_a_mesh_of_other_ranks_is_refused() -> None:
    with pytest.raises(MeshError, match="it must hold each of 0 to 0 once"):
        twinkle.initialize(global_device_mesh=DeviceMesh(mesh=np.array([3]), mesh_dim_names=("dp",)))


def test_published_arguments_that_only_other_runtimes_use_are_accepted() -> None:
    groups = [DeviceGroup("model", 4, "cuda"), DeviceGroup("sampler", [4, 5], "cuda")]
    twinkle.initialize("local", nproc_per_node=4, ncpu_proc_per_node=2, groups=groups, lazy_collect=False, name="trial")
    assert current_runtime().options.groups == tuple(groups)
    assert current_runtime().options.name == "trial"


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("nproc_per_node", 0, "nproc_per_node is 0"),
        ("global_device_mesh", (2, 2), "give a DeviceMesh"),
        ("groups", ["model"], "each must be a DeviceGroup"),
        ("groups", [DeviceGroup("a", 1, "cpu")] * 2, "several device groups are called a"),
    ],
)
def test_wrong_arguments_are_refused(argument: str, value: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        twinkle.initialize(**{argument: value})


def test_the_mode_ray_names_the_package_that_is_not_there_yet() -> None:
    with pytest.raises(RequirementMissing, match="package twinkle-ray, which provides it, is not available yet"):
        twinkle.initialize("ray")


def test_no_installed_package_provides_the_mode_that_is_refused() -> None:
    assert "ray" not in registry().specs("runtime")
    assert "http" in registry().specs("runtime")  # twinkle-client


def test_options_of_another_runtime_are_refused() -> None:
    with pytest.raises(ArgumentError, match="base_url"):
        twinkle.initialize("local", base_url="http://127.0.0.1:8000")


def test_a_misspelt_mode_names_the_nearest() -> None:
    with pytest.raises(ComponentNotFound, match="nearest: 'local'"):
        twinkle.initialize("locl")


def test_initializing_again_with_other_arguments_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twinkle"):
        twinkle.initialize(seed=1)
        twinkle.initialize(seed=1)
        assert caplog.messages == []
        twinkle.initialize(seed=2, name="trial")
    assert caplog.messages == ["initialize called again: seed 1 -> 2, name None -> trial"]


def test_a_notifier_is_resolved_and_kept() -> None:
    twinkle.initialize(notifier=Bell)
    assert isinstance(current_runtime().options.notifier, Bell)
    with pytest.raises(ComponentNotFound, match="Pidgeon"):
        twinkle.initialize(notifier="Pidgeon")


def test_the_placement_shows_every_rank_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    twinkle.initialize(groups=[DeviceGroup("model", [0, 1], "cpu"), DeviceGroup("sampler", 2, "cpu")])
    current_runtime().mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2)
    lines = twinkle.get_device_placement().splitlines()
    assert lines[0].startswith("runtime local: rank 0 of 1 on ")
    assert lines[1] == "mesh fsdp 2 x dp 2 = 4"
    assert [line.split() for line in lines[2:7]] == [
        ["rank", "fsdp", "dp", "data"],
        ["0", "0", "0", "0"],
        ["1", "0", "1", "2"],
        ["2", "1", "0", "1"],
        ["3", "1", "1", "3"],
    ]
    assert lines[7:] == ["group model: ranks 0, 1 on CPU", "group sampler: 2 ranks on CPU"]
    assert "sampler" not in twinkle.get_device_placement("model")
    with pytest.raises(ArgumentError, match="no device group 'modle'"):
        twinkle.get_device_placement("modle")


def test_the_placement_can_be_asked_for_before_initialize() -> None:
    assert "mesh dp 1 = 1" in twinkle.get_device_placement()


def test_placing_arguments_are_accepted_everywhere_and_never_reach_the_constructor() -> None:
    component = Component(2, remote_group="model", instance_id="a", color="red")
    assert component.options == {"color": "red"}
    assert Grown("x", remote_group="model").size == 3  # type: ignore[call-arg]
    assert isinstance(Empty(remote_group="model"), Empty)  # type: ignore[call-arg]


def test_a_mesh_left_out_is_the_global_one() -> None:
    assert Component(1).device_mesh is None
    twinkle.initialize()
    mesh, own = current_runtime().mesh, DeviceMesh.from_sizes(dp_size=2)
    made = (Component(1), Component(1, None), Component(1, device_mesh=None), Grown("x"), First(1), KeywordOnly(1, 2))
    assert all(component.device_mesh is mesh for component in made)
    assert Component(1, own).device_mesh is own
    assert KeywordOnly(1, device_mesh=own).device_mesh is own


def test_signatures_and_names_stay_as_written() -> None:
    assert list(inspect.signature(Component).parameters) == ["size", "device_mesh", "options"]
    assert list(inspect.signature(Grown).parameters) == ["extra"]
    assert list(inspect.signature(First).parameters) == ["size", "device_mesh", "options"]
    assert str(inspect.signature(Empty)) == "()"
    assert Component.__init__.__qualname__ == "Component.__init__"


def test_an_unknown_argument_is_still_an_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        Grown("x", colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Empty(1)  # type: ignore[call-arg]


def test_decorators_record_and_a_call_stays_a_call() -> None:
    assert Component.__twinkle_remote__ == RemoteClass("all")  # type: ignore[attr-defined]
    assert First.__twinkle_remote__ == RemoteClass("first")  # type: ignore[attr-defined]
    expected = RemoteFunction(dispatch="slice_dp", collect="mean", timeout=5.0)
    assert Component.work.__twinkle_remote__ == expected  # type: ignore[attr-defined]
    assert Component(2).work([1, 2]) == 6


def test_objects_pickle_as_before() -> None:
    assert pickle.loads(pickle.dumps(Grown("x"))).extra == "x"


def test_a_class_keeps_its_own_subclass_hook() -> None:
    seen = []

    class Base:
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

    remote = remote_class()(Base)
    type("Child", (remote,), {})
    assert seen == ["Child"]


def test_a_class_that_declares_instance_id_gets_it() -> None:
    @remote_class()
    class Named:
        def __init__(self, instance_id: str = "") -> None:
            self.instance_id = instance_id

    assert Named(instance_id="a", remote_group="b").instance_id == "a"  # type: ignore[call-arg]


def test_another_runtime_may_build_a_stand_in_and_the_old_one_is_shut_down() -> None:
    runtime = Elsewhere()
    twinkle.initialize(runtime)
    assert twinkle.get_device_placement() == "elsewhere"
    assert Component(1, remote_group="model") == ("stand-in", Component, (1,), {"remote_group": "model"})
    assert isinstance(Component(1), Component)
    twinkle.initialize("local")
    assert runtime.shut


@pytest.mark.parametrize(
    "arguments", [{"dispatch": "slcie"}, {"execute": "one"}, {"collect": "avg"}, {"timeout": 0}, {"timeout": -1.0}]
)
def test_values_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        remote_function(**arguments)


def test_functions_may_dispatch_and_collect() -> None:
    def own(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    marked = remote_function(dispatch=own, collect=own)(own)
    assert marked.__wrapped__ is own
    assert marked(1, two=2) == ((1,), {"two": 2})
    assert marked.__twinkle_remote__.dispatch is own  # type: ignore[attr-defined]


def test_a_decorator_without_brackets_says_so() -> None:
    with pytest.raises(ArgumentError, match="with brackets"):
        remote_class(Empty)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="requires a class"):
        remote_class()(len)  # type: ignore[type-var]


@pytest.mark.full
def test_two_processes_join_and_divide_the_work(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist, twinkle
            mesh = twinkle.DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
            twinkle.initialize(global_device_mesh=mesh)
            total = torch.tensor(list(range(7))[mesh.get_slice(7)]).sum()
            dist.all_reduce(total, group=mesh.get_dim_group("dp"))
            again = mesh.get_dim_group("dp") is mesh.get_dim_group(["dp"])
            print(mesh.data_rank, total.item(), again, mesh.to_torch_device_mesh().mesh_dim_names)
            from twinkle.runtime import current_runtime
            current_runtime().shutdown()
            current_runtime().shutdown()
            """
        )
    )
    port = str(find_free_port("127.0.0.1"))
    processes = []
    for rank in ("0", "1"):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {**os.environ, **world, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        processes.append(subprocess.Popen([sys.executable, script], env=environ, stdout=subprocess.PIPE, text=True))
    output = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert output == ["0 21 True ('dp',)", "1 21 True ('dp',)"]

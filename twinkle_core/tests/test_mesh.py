"""Device meshes: the arithmetic of ranks against a brute-force enumeration, and errors that show their arithmetic."""

import itertools
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle import DeviceGroup, DeviceMesh
from twinkle.errors import ArgumentError, MeshError

ORDER = ("fsdp", "pp", "dp", "cp", "tp")
sizes = st.fixed_dictionaries({name: st.one_of(st.none(), st.integers(1, 4)) for name in ORDER}).map(
    lambda found: found | {"dp": found["dp"] or 1}
)


def make(found: dict[str, int | None], **more: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(**{f"{name}_size": size for name, size in found.items()}, **more)


def places(found: dict[str, int | None]) -> Iterator[tuple[int, dict[str, int]]]:
    """Count ranks by hand: the last dimension varies fastest."""
    each = [range(found[name] or 1) for name in ORDER]
    for rank, place in enumerate(itertools.product(*each)):
        yield rank, dict(zip(ORDER, place, strict=True))


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))


@settings(deadline=None)
@given(sizes)
def test_every_rank_has_the_place_that_counting_gives_it(found: dict[str, int | None]) -> None:
    mesh = make(found)
    with pytest.MonkeyPatch.context() as patch:
        for rank, place in places(found):
            on_rank(patch, rank)
            expected = [None if found[name] is None else index for name, index in place.items()]
            assert [mesh.fsdp_rank, mesh.pp_rank, mesh.dp_rank, mesh.cp_rank, mesh.tp_rank] == expected


@settings(deadline=None)
@given(sizes, st.sampled_from([1, 2, 4]))
def test_the_data_rank_follows_the_formula_and_ranks_of_one_sequence_are_neighbours(
    found: dict[str, int | None], ulysses: int
) -> None:
    dp, fsdp = found["dp"] or 1, found["fsdp"] or 1
    if dp * fsdp % ulysses:
        with pytest.raises(MeshError, match=f"ulysses_size {ulysses} does not divide"):
            make(found, ulysses_size=ulysses)
        return
    mesh = make(found, ulysses_size=ulysses)
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, place in places(found):
        data_rank = mesh.get_data_rank_from_global_rank(rank)
        assert data_rank == (place["dp"] * fsdp + place["fsdp"]) // ulysses
        members.setdefault(data_rank, []).append((place["dp"], place["fsdp"]))
    assert sorted(members) == list(range(mesh.data_world_size))
    assert {len(set(group)) for group in members.values()} == {ulysses}


@settings(deadline=None)
@given(sizes, st.integers(0, 100))
def test_slices_partition_the_batch_evenly_and_in_order(found: dict[str, int | None], length: int) -> None:
    mesh = make(found)
    parts = [list(range(length))[mesh.get_slice(length, rank)] for rank in range(mesh.data_world_size)]
    assert list(itertools.chain(*parts)) == list(range(length))
    counts = [len(part) for part in parts]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_a_process_gets_the_slice_of_its_own_data_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=3, tp_size=2)
    on_rank(monkeypatch, 3)  # dp 1, tp 1
    assert mesh.data_rank == 1
    assert mesh.get_slice(10) == slice(4, 7)


@settings(deadline=None)
@given(sizes, st.sets(st.sampled_from(ORDER), min_size=1))
def test_rank_groups_are_the_ranks_that_differ_in_these_dimensions_only(
    found: dict[str, int | None], dims: set[str]
) -> None:
    expected: dict[tuple[int, ...], list[int]] = {}
    for rank, place in places(found):
        key = tuple(index for name, index in place.items() if name not in dims)
        expected.setdefault(key, []).append(rank)
    groups = make(found).get_rank_groups(tuple(dims))
    assert sorted(map(sorted, groups)) == sorted(expected.values())


@settings(deadline=None)
@given(sizes)
def test_stage_and_tensor_parallel_ranks_are_those_of_an_enumeration(found: dict[str, int | None]) -> None:
    mesh = make(found)
    last_tp, last_pp = (found["tp"] or 1) - 1, (found["pp"] or 1) - 1
    everyone = list(places(found))
    assert mesh.get_tp_last_ranks() == [rank for rank, place in everyone if place["tp"] == last_tp]
    assert mesh.get_pp_first_ranks() == [rank for rank, place in everyone if place["pp"] == 0]
    assert mesh.get_pp_last_ranks() == [rank for rank, place in everyone if place["pp"] == last_pp]
    for rank, place in everyone:
        assert mesh.is_tp_last_rank(rank) == (place["tp"] == last_tp)
        assert mesh.is_pp_first_rank(rank) == (place["pp"] == 0)
        assert mesh.is_pp_last_rank(rank) == (place["pp"] == last_pp)


@settings(deadline=None)
@given(sizes)
def test_results_are_collected_once_from_each_data_rank_at_the_last_stage(found: dict[str, int | None]) -> None:
    mesh = make(found)
    ranks = mesh.get_collect_ranks()
    assert [mesh.get_data_rank_from_global_rank(rank) for rank in ranks] == list(range(mesh.data_world_size))
    assert all(mesh.is_pp_last_rank(rank) for rank in ranks)


def test_dimensions_lie_in_the_order_fsdp_pp_dp_cp_tp() -> None:
    mesh = DeviceMesh.from_sizes(tp_size=2, cp_size=3, dp_size=5, pp_size=7, fsdp_size=11)
    assert mesh.mesh_dim_names == ORDER
    assert mesh.mesh.shape == (11, 7, 5, 3, 2)
    assert np.array_equal(mesh.mesh.ravel(), np.arange(11 * 7 * 5 * 3 * 2))


def test_the_world_size_is_computed_where_it_is_left_out() -> None:
    assert DeviceMesh.from_sizes(fsdp_size=4, dp_size=2).world_size == 8
    assert DeviceMesh.from_sizes().is_single_process


def test_an_absent_dimension_counts_as_one_of_size_one() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    assert not mesh.has_dim("tp")
    assert (mesh.tp_world_size, mesh.tp_rank, mesh.get_dim_size("pp")) == (1, None, 1)


def test_sizes_that_do_not_multiply_show_the_arithmetic_and_a_way_out() -> None:
    with pytest.raises(MeshError, match="fsdp 4 x dp 2 = 8, but world_size is 6: leave world_size out"):
        DeviceMesh.from_sizes(world_size=6, fsdp_size=4, dp_size=2)
    with pytest.raises(MeshError, match=r"fsdp 4 x dp 1 = 4, but world_size is 8: set dp_size=2"):
        DeviceMesh.from_sizes(world_size=8, fsdp_size=4)


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2"])
def test_a_size_that_is_no_positive_number_is_refused(size: object) -> None:
    with pytest.raises(MeshError, match=r"tp_size is .*; it must be a whole number from 1 on"):
        DeviceMesh.from_sizes(tp_size=size)  # type: ignore[arg-type]


def test_an_unknown_dimension_names_the_nearest() -> None:
    with pytest.raises(MeshError, match="no dimension 'fsp'; nearest: 'fsdp'"):
        DeviceMesh.from_sizes(fsdp_size=2).has_dim("fsp")
    with pytest.raises(MeshError, match="no dimension 'model'"):
        DeviceMesh(mesh=np.arange(2), mesh_dim_names=("model",))


def test_a_mesh_of_wrong_axes_or_repeated_ranks_is_refused() -> None:
    with pytest.raises(MeshError, match="2 axes"):
        DeviceMesh(mesh=np.zeros((2, 2), dtype=int), mesh_dim_names=("dp",))
    with pytest.raises(MeshError, match="distinct ranks"):
        DeviceMesh(mesh=np.array([0, 0]), mesh_dim_names=("dp",))
    with pytest.raises(MeshError, match="ranks are from 0 on"):
        DeviceMesh(mesh=np.array([-1, 0]), mesh_dim_names=("dp",))


def test_expert_sizes_must_divide_a_pipeline_stage() -> None:
    assert DeviceMesh.from_sizes(dp_size=4, pp_size=2, ep_size=4).ep_world_size == 4
    with pytest.raises(MeshError, match=r"ep 8 x etp 1 x ep_fsdp 1 = 8 does not divide the 4 ranks"):
        DeviceMesh.from_sizes(dp_size=4, pp_size=2, ep_size=8)


def test_the_expert_rank_counts_within_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4, pp_size=2, ep_size=2, etp_size=2)
    found = []
    for rank in range(8):
        on_rank(monkeypatch, rank)
        found.append(mesh.ep_rank)
    assert found == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_rank_outside_the_mesh_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank(monkeypatch, 5)
    with pytest.raises(MeshError, match="rank 5 is not in the mesh dp 2 = 2 of ranks 0-1"):
        _ = DeviceMesh.from_sizes(dp_size=2).dp_rank


def test_slices_of_a_rank_that_does_not_exist_are_refused() -> None:
    with pytest.raises(MeshError, match="data rank 2 is not among the 2 data ranks"):
        DeviceMesh.from_sizes(dp_size=2).get_slice(4, rank=2)
    with pytest.raises(MeshError, match="must not be negative"):
        DeviceMesh.from_sizes(dp_size=2).get_slice(-1, rank=0)


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(MeshError, match="pipeline stage 2 does not exist"):
        DeviceMesh.from_sizes(pp_size=2).get_pp_stage_ranks(2)


def test_meshes_compare_hash_and_pickle_by_layout() -> None:
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert hash(mesh) == hash(DeviceMesh.from_sizes(fsdp_size=2, dp_size=2))
    assert mesh != DeviceMesh.from_sizes(fsdp_size=4)
    assert mesh != "mesh"


def test_the_device_type_is_torchs_name_whatever_was_written() -> None:
    assert DeviceMesh.from_sizes(device_type="GPU").device_type == "cuda"


def test_process_groups_want_torch_distributed_and_say_how_to_get_it() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    for call in (mesh.to_torch_device_mesh, lambda: mesh.get_dim_group("dp")):
        with pytest.raises(MeshError, match="start with torchrun and call"):
            call()


@pytest.mark.parametrize(("written", "kept"), [("cuda", "GPU"), ("GPU", "GPU"), ("npu", "NPU"), ("Cpu", "CPU")])
def test_a_device_group_takes_its_device_type_in_any_case(written: str, kept: str) -> None:
    assert DeviceGroup("model", 4, written).device_type == kept


def test_a_device_group_counts_its_ranks() -> None:
    assert DeviceGroup("model", 4, "cpu").world_size == 4
    assert DeviceGroup("model", [2, 5], "cpu").world_size == 2


@pytest.mark.parametrize("ranks", [0, -1, [], [1, 1], [-1, 0]])
def test_a_device_group_refuses_impossible_ranks(ranks: int | list[int]) -> None:
    with pytest.raises(MeshError, match="device group 'model'"):
        DeviceGroup("model", ranks, "cpu")


def test_a_device_group_refuses_what_it_cannot_place() -> None:
    with pytest.raises(MeshError, match="device type 'tpu' is unknown; use one of CPU, GPU"):
        DeviceGroup("model", 4, "tpu")
    with pytest.raises(MeshError, match="4 ranks do not divide into workers of gpus_per_worker=3"):
        DeviceGroup("model", 4, "gpu", gpus_per_worker=3)


def test_an_unknown_size_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ArgumentError, match=r"DeviceMesh.from_sizes: unknown argument 'dp'.* dp_size"):
        DeviceMesh.from_sizes(dp=2)  # type: ignore[call-arg]

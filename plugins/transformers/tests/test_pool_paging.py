"""Idle adapters wait in host memory or on disk, within their bounds, and come back bit for bit."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_states import OPTIMIZERS, ROWS, equal, everything, opened, train
from pools import flat_of, lora, open_pool

from twinkle.engine import AdapterBytes, Operation, OperationError, OperationResult
from twinkle.errors import ArgumentError, CapacityError, CheckpointError, OutputError, TrainingStateError
from twinkle.testing import tiny_model
from twinkle_transformers.pool import paging

Move = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


# paging


def to_disk(model: Any, name: str) -> None:
    model.pool.page(name, "disk")


def to_disk_and_host(model: Any, name: str) -> None:
    for place in ("host", "disk", "host"):
        model.pool.page(name, place)


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("move", [to_disk, to_disk_and_host])
def test_a_paged_adapter_comes_back_bit_for_bit_and_trains_on_as_if_it_had_stayed(
    folder: Path, optimizer: str, move: Move
) -> None:
    stays, goes = opened(folder, "a", optimizer=optimizer), opened(folder, "a", optimizer=optimizer)
    for model in (stays, goes):
        train(model, "a", range(3))
    for seed in range(3, 6):
        version = goes.pool.version("a")
        move(goes, "a")
        assert goes.pool.bytes_of("a").device == 0
        assert equal(everything(goes, "a"), everything(stays, "a"))
        assert goes.pool.bytes_of("a").device > 0
        assert goes.pool.version("a").key == version.key
        move(goes, "a")
        for model in (stays, goes):
            train(model, "a", range(seed, seed + 1))
    assert equal(everything(goes, "a"), everything(stays, "a"))


@pytest.mark.full
def test_whatever_needs_a_paged_adapter_brings_it_back(folder: Path, tmp_path: Path) -> None:
    model = opened(folder, scheduler=False)
    train(model, "a", range(3))
    weights = model.get_state_dict(adapter_name="a")
    saved = model.save("first", str(tmp_path), adapter_name="a", save_optimizer=True)
    row = ROWS[0][0]
    calls: list[Callable[[], object]] = [
        lambda: model.pool.run([Operation("a", "forward", [row])]),
        lambda: model.forward_only(inputs=[row, row], adapter_name=["a", None]),
        lambda: model.pool.version("a"),
        lambda: model.pool.snapshot("a"),
        lambda: model.save("second", str(tmp_path), adapter_name="a"),
        lambda: model.load(saved, adapter_name="a"),
        lambda: model.clip_grad_and_step(adapter_name=["a"]),
        lambda: model.zero_grad(adapter_name="a", flush=True),
        lambda: model.resume_from_checkpoint(saved, adapter_name="a"),
        lambda: model.pool.page("a", "device"),
    ]
    for call in calls:
        model.pool.page("a", "disk")
        call()
        assert model.pool.bytes_of("a").device > 0
        assert equal(model.get_state_dict(adapter_name="a"), weights)


def test_looking_at_a_paged_adapter_from_outside_gives_no_number(folder: Path) -> None:
    model = opened(folder, optimizer="matrices")
    tenant = model.pool.tenants["a"]
    model.pool.page("a", "disk")
    assert tenant.flat.isnan().all()
    assert all(view.isnan().all() for view in tenant.views().values())
    assert tenant.flat.untyped_storage().nbytes() == 4


def test_bytes_are_counted_where_they_are(folder: Path) -> None:
    model = opened(folder)
    count = flat_of(model, "a").numel()
    assert model.pool.bytes_of("a").device == 4 * count
    train(model, "a", range(1))
    assert model.pool.bytes_of("a").device == 8 * count
    train(model, "a", range(1))
    trained = model.pool.bytes_of("a").device
    assert trained == 16 * count + 4  # weights, memory for gradients, two moments, the number of steps
    model.pool.version("a")
    assert model.pool.bytes_of("a").device == trained + 4 * count
    model.pool.page("a", "host")
    paged = model.pool.bytes_of("a")
    assert (paged.device, paged.host, paged.disk) == (0, 12 * count + 4, 0)
    model.pool.page("a", "disk")
    paged = model.pool.bytes_of("a")
    assert (paged.device, paged.host, paged.disk) == (0, 0, 12 * count + 4)


@pytest.mark.full
def test_files_go_when_nobody_wants_them_any_more(folder: Path, tmp_path: Path) -> None:
    model = opened(folder, "a", "A", "c")
    for name in ("a", "A", "c"):
        model.pool.page(name, "disk", tmp_path / "pages")
    files = sorted((tmp_path / "pages").iterdir())
    assert len({str(path).lower() for path in files}) == 3
    assert all(path.suffix == ".safetensors" for path in files)
    model.pool.page("a", "device")
    assert len(list((tmp_path / "pages").iterdir())) == 2
    model.remove_adapter("A")
    assert len(list((tmp_path / "pages").iterdir())) == 1
    model.pool.page("c", "disk", tmp_path / "elsewhere")
    assert not list((tmp_path / "pages").iterdir())
    model.pool.page("c", "disk")  # it is there already
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    del model
    gc.collect()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_pools_own_folder_goes_with_the_pool(folder: Path) -> None:
    model = opened(folder)
    model.pool.page("a", "disk")
    own = model.pool.paging._folder
    assert len(list(own.iterdir())) == 1
    del model
    gc.collect()
    assert not own.exists()


def test_a_file_that_cannot_be_written_leaves_the_adapter_where_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(folder)
    train(model, "a", range(3))
    before = everything(model, "a")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot create"):
        model.pool.page("a", "disk", tmp_path / "file")

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    for place in ("device", "host"):
        model.pool.page("a", place)
        with monkeypatch.context() as patch:
            patch.setattr("twinkle_transformers.pool.paging.save_file", full)
            with pytest.raises(OutputError, match=r"adapter 'a' \([\d,]+ bytes\) cannot be paged .*No space left"):
                model.pool.page("a", "disk", tmp_path / "full")
        assert getattr(model.pool.bytes_of("a"), place) > 0
        assert not list((tmp_path / "full").iterdir())
    assert equal(everything(model, "a"), before)


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_page_that_somebody_harmed_is_an_error_of_that_adapter_alone(folder: Path, tmp_path: Path, harm: str) -> None:
    model = opened(folder)
    model.pool.page("a", "disk", tmp_path)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    file.unlink() if harm == "gone" else file.write_bytes(whole[:-9])
    results = model.pool.run([Operation(name, "forward", ROWS[0]) for name in ("a", "b")])
    assert isinstance(results[0], OperationError)
    assert isinstance(results[0].error, CheckpointError)
    assert isinstance(results[1], OperationResult)
    file.write_bytes(whole)
    assert isinstance(model.pool.run([Operation("a", "forward", ROWS[0])])[0], OperationResult)


@pytest.mark.full
def test_wrong_places_and_adapters_in_use_are_refused(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    with pytest.raises(ArgumentError, match="to must be 'device', 'host' or 'disk', got 'gpu'"):
        model.pool.page("a", "gpu")
    with pytest.raises(ArgumentError, match="folder= requires to='disk', got 'host'"):
        model.pool.page("a", "host", tmp_path)
    with pytest.raises(ArgumentError, match=r"adapter_memory must be a number of bytes .* or None, got -1"):
        open_pool(folder, adapter_memory=-1)

    def loss(inputs: Any, outputs: Any) -> Any:
        model.pool.page("a", "host")

    [result] = model.pool.run([Operation("a", "forward_backward", ROWS[0], loss)])
    assert isinstance(result.error, TrainingStateError)
    assert "cannot page adapter 'a': a call uses it" in str(result.error)
    train(model, "a", range(2))


# bounds of memory


def size_of(folder: Path) -> int:
    model = opened(folder, "a", scheduler=False)
    train(model, "a", range(2))
    return int(model.pool.bytes_of("a").device)


@pytest.mark.full
def test_adapters_stay_within_their_bound_and_train_as_if_there_were_none(folder: Path) -> None:
    size = size_of(folder)
    names = [f"t{number}" for number in range(7)]
    free = opened(folder, *names, scheduler=False)
    bound = opened(folder, *names, scheduler=False, adapter_memory=3 * size, host_memory=2 * size)
    for model in (free, bound):
        for turn in range(8):
            now = [names[(turn * 2 + k) % 7] for k in range(3)]
            rows = [row for k in range(3) for row in ROWS[(turn + k) % 6]]
            model.forward_backward(inputs=rows, adapter_name=[name for name in now for _ in range(2)])
            model.clip_grad_and_step(adapter_name=now)
            if model is bound:
                taken = [model.pool.bytes_of(name) for name in names]
                assert sum(t.device for t in taken) == model.pool.paging.used <= 3 * size
                assert sum(t.host for t in taken) <= 2 * size
                assert all(model.pool.bytes_of(name).device for name in now)  # who was used last is there
    assert any(bound.pool.bytes_of(name).disk for name in names)
    for name in names:
        assert equal(everything(bound, name), everything(free, name))


@pytest.mark.full
def test_who_was_idle_longest_goes_first(folder: Path) -> None:
    model = opened(folder, "a", "b", "c", scheduler=False, adapter_memory=3 * flat_bytes(folder))
    model.pool.run([Operation(name, "forward", ROWS[0]) for name in ("b", "a", "c")])
    model.add_adapter_to_model("d", lora(4))
    assert not any(model.pool.bytes_of(name).host for name in "abcd")  # it takes no memory before it is used
    model.pool.run([Operation("d", "forward", ROWS[0])])
    assert [name for name in "abcd" if model.pool.bytes_of(name).host] == ["b"]
    model.pool.tenants["b"]
    assert [name for name in "abcd" if model.pool.bytes_of(name).host] == ["a"]


def flat_bytes(folder: Path) -> int:
    return int(flat_of(opened(folder, "a"), "a").numel() * 4)


@pytest.mark.full
def test_more_than_there_is_room_for_at_once_is_refused_with_the_figures(folder: Path) -> None:
    size = flat_bytes(folder)
    model = opened(folder, "a", "b", "c", scheduler=False, adapter_memory=2 * size)
    results = model.pool.run([Operation(name, "forward", ROWS[0]) for name in ("a", "b", "c")])
    assert [type(result) for result in results] == [OperationResult, OperationResult, OperationError]
    assert isinstance(results[2].error, CapacityError)
    assert str(results[2].error) == (
        f"adapter 'c' needs {size:,} bytes on the device, where adapters may take {2 * size:,} (adapter_memory); "
        f"adapters in use hold {2 * size:,} of it: 'a' {size:,}, 'b' {size:,}; use fewer at once, or raise "
        "adapter_memory"
    )
    with pytest.raises(CapacityError, match="adapter 'c' needs"):
        model.forward_only(inputs=[ROWS[0][0]] * 3, adapter_name=["a", "b", "c"])
    assert model.forward_only(inputs=[ROWS[0][0]] * 2, adapter_name=["b", "c"])
    small = open_pool(folder, adapter_memory=size - 1)
    with pytest.raises(CapacityError, match=rf"adapter 'x' needs {size:,} bytes .* may take {size - 1:,}"):
        small.add_adapter_to_model("x", lora(4))
    assert small.pool.tenants.names() == []


def test_gradients_and_moments_have_room_before_they_are_computed(folder: Path) -> None:
    size = flat_bytes(folder)
    model = opened(folder, "a", "b", scheduler=False, adapter_memory=5 * size)
    results = model.pool.run([Operation(name, "forward_backward", ROWS[0]) for name in ("a", "b")])
    assert isinstance(results[0], OperationResult)
    assert isinstance(results[1].error, CapacityError)
    assert flat_of(model, "b").grad is None
    assert model.optimizer_group["b"].pending == 0
    model.clip_grad_and_step(adapter_name=["a"], gradient_accumulation_steps=1)
    assert model.pool.paging.used <= 5 * size + 4  # the number of steps


def test_idle_adapters_that_cannot_leave_are_told_and_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = flat_bytes(folder)
    model = opened(folder, "a", scheduler=False, adapter_memory=size, host_memory=0)
    monkeypatch.setattr(
        "twinkle_transformers.pool.paging.save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full"))
    )
    model.add_adapter_to_model("b", lora(4))
    with pytest.raises(CapacityError, match="the idle ones cannot be paged out: see the log"):
        model.pool.version("b")
    assert "disk full" in caplog.text
    assert isinstance(model.pool.run([Operation("a", "forward", ROWS[0])])[0], OperationResult)


@pytest.mark.full
def test_adapters_that_nobody_used_take_no_memory_and_are_drawn_from_their_seed_alone(folder: Path) -> None:
    model, other = open_pool(folder), open_pool(folder)
    for at in range(40):
        model.add_adapter_to_model(f"t{at}", lora(4, lora_dropout=0.0), seed=at)
    other.add_adapter_to_model("t7", lora(4), seed=7)
    other.pool.version("t7")
    assert model.pool.paging.used == 0
    model.pool.page("t3", "disk")  # where it is already, in a way
    assert [model.pool.bytes_of(f"t{at}") for at in range(40)] == [AdapterBytes()] * 40
    torch.manual_seed(99)
    version = model.pool.version("t7")
    assert torch.equal(version.flat, flat_of(other, "t7"))
    assert model.pool.paging.used == 2 * version.flat.numel() * 4
    model.remove_adapter("t8")
    assert len(model.pool.tenants) == 39


@pytest.mark.full
def test_a_sampler_takes_versions_in_another_thread_while_adapters_move(folder: Path) -> None:
    size = flat_bytes(folder)
    names = [f"t{at}" for at in range(6)]
    model = opened(folder, *names, scheduler=False, adapter_memory=8 * size, host_memory=3 * size)
    wanted = {name: flat_of(model, name).detach().clone() for name in names}

    def sample(turn: int) -> bool:
        name = names[turn % 6]
        return torch.equal(model.pool.version(name).flat, wanted[name])

    with ThreadPoolExecutor(2) as threads:
        found = threads.map(sample, range(120))
        for turn in range(20):
            model.pool.run([Operation(names[(turn + at) % 6], "forward", ROWS[0]) for at in range(2)])
        assert all(found)


def test_defaults_are_shares_of_the_memory_that_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "free_bytes", lambda device: 1_000)
    monkeypatch.setattr(paging, "free_host_bytes", lambda: 2_000)
    found = paging.Paging(torch.device("cpu"))
    assert (found.limit, found.host_limit) == (400, 500)
    monkeypatch.setattr(paging, "free_bytes", lambda device: None)
    assert paging.Paging(torch.device("cpu")).limit is None

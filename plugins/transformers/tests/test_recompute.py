"""Recomputation: what a forward keeps is predicted, the decision follows the memory, the gradients stay the same."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from twinkle.errors import ArgumentError, Unsupported
from twinkle.testing import tiny_model
from twinkle_transformers.memory import Footprint, Recompute, free_bytes, free_host_bytes, measure, saved_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), attention_dropout=0.1)


def load(folder: Path, *, lora: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    if lora:
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
        peft.get_peft_model(model, config)
    return model.train()


def batch(rows: int, width: int, masked: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 256, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


def kept_by(model: Any, rows: int, width: int, masked: bool = True) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    return saved_bytes(lambda _: model.base_model(**batch(rows, width, masked), use_cache=False), 0, own)


def gradients(model: Any, rows: int = 2, width: int = 9) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    data = batch(rows, width)
    model(**data, labels=data["input_ids"]).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def deciding(model: Any, free: int | None, **options: Any) -> Recompute:
    return Recompute(model, "auto", "cpu", free=lambda device: free, **options)


# what a forward keeps


def test_storages_are_counted_once_and_parameters_not_at_all() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(rows: int) -> torch.Tensor:
        hidden = torch.ones(rows, 4) @ weight  # keeps its input
        return (hidden * hidden.view(-1, 4)).exp().sum()  # keeps hidden once, and the result of exp

    own = {weight.untyped_storage().data_ptr()}
    assert saved_bytes(forward, 10, own) == 3 * 10 * 4 * 4
    assert saved_bytes(forward, 10, set()) == 3 * 10 * 4 * 4  # the frozen input needs no weight for its gradient


def test_a_footprint_is_fitted_exactly_to_constant_line_and_parabola() -> None:
    def forward(width: int) -> Any:
        sizes = (1000, 3 * width, 2 * width * width)
        return [torch.ones(size, requires_grad=True).exp() for size in sizes]

    assert measure(forward, [], unit=5) == Footprint(fixed=4000, per_token=12, per_pair=8)


@pytest.mark.sample(6)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no-mask"])
@pytest.mark.parametrize(("rows", "width"), [(1, 200), (4, 60), (6, 33)])
def test_the_prediction_is_near_what_a_batch_really_keeps(
    folder: Path, lora: bool, attention: str, masked: bool, rows: int, width: int
) -> None:
    model = load(folder, lora=lora, attn_implementation=attention)
    recompute = deciding(model, 1 << 40)
    missing = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    predicted = recompute.needed_bytes(rows * width, width, masked=masked)
    kept = kept_by(model, rows, width, masked)
    assert predicted is not None
    assert 1.0 <= (predicted - missing) / kept < 1.05


def test_gradients_that_exist_already_are_not_counted_again(folder: Path) -> None:
    model = load(folder)
    recompute = deciding(model, 1 << 40)
    before = recompute.needed_bytes(8, 8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    after = recompute.needed_bytes(8, 8)
    assert before is not None
    assert after is not None
    assert before - after == sum(p.numel() * 4 for p in model.parameters())


def test_measuring_leaves_generator_mode_and_gradients_alone(folder: Path) -> None:
    model = load(folder).eval()
    state = torch.get_rng_state()
    deciding(model, 1 << 40).prepare(8, 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


# the decision


def test_it_recomputes_exactly_when_four_fifths_of_the_free_memory_are_not_enough(folder: Path) -> None:
    model = load(folder)
    needed = deciding(model, 0).needed_bytes(100, 50)
    assert needed is not None
    for free, wanted in ((int(needed / 0.8) + 2, False), (int(needed / 0.8) - 2, True), (None, True)):
        recompute = deciding(model, free)
        recompute.prepare(100, 50)
        assert recompute.on is wanted


def test_it_decides_for_each_pass_and_switches_the_model_only_on_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    switched = []
    for name in ("enable", "disable"):
        method = getattr(model, f"activation_checkpointing_{name}")
        monkeypatch.setattr(
            model,
            f"activation_checkpointing_{name}",
            lambda *args, method=method, name=name: (switched.append(name), method(*args)),
        )
    needed = deciding(model, 0).needed_bytes(100, 50)
    recompute = deciding(model, needed)
    for tokens in (10, 20, 100, 200, 100, 10, 10):
        recompute.prepare(tokens, 10)
    assert switched == ["enable", "disable"]
    assert not recompute.on


def test_an_unknown_width_is_taken_for_one_row(folder: Path) -> None:
    model = load(folder, attn_implementation="eager")
    free = 2 * (deciding(model, 0).needed_bytes(400, 10) or 0)
    recompute = deciding(model, free)
    recompute.prepare(400, 10)
    assert not recompute.on
    recompute.prepare(400)
    assert recompute.on


def test_true_and_false_decide_nothing(folder: Path) -> None:
    def unasked(device: torch.device) -> int:
        raise AssertionError("memory was asked for")

    for mode in (True, False):
        model = load(folder)
        recompute = Recompute(model, mode, "cpu", free=unasked)
        recompute.prepare(10**12)
        assert recompute.on is mode
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is mode


def test_each_adapter_is_measured_once_until_the_model_changes(folder: Path) -> None:
    seen = []

    def forward(row: dict[str, torch.Tensor]) -> Any:
        seen.append(row["input_ids"].shape[1])
        return model.base_model(**row, use_cache=False)

    model = load(folder)
    recompute = deciding(model, 1 << 40, forward=forward)
    for adapter in ("a", "b", "a", "b"):
        recompute.prepare(8, 8, adapter)
    assert seen == [64, 128, 192] * 2
    recompute.forget()
    recompute.prepare(8, 8, "a")
    assert len(seen) == 9


def test_short_contexts_are_measured_within_their_length(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=20))
    seen: list[int] = []
    recompute = deciding(model, 1 << 40, forward=lambda row: seen.append(row["input_ids"].shape[1]))
    recompute.prepare(8, 8)
    assert seen == [6, 12, 18]


def test_ranks_in_lockstep_recompute_if_one_of_them_must(folder: Path) -> None:
    wishes: list[bool] = []
    recompute = deciding(load(folder), 1 << 40, agree=lambda wish: wishes.append(wish) or True)
    recompute.prepare(8, 8)
    assert (wishes, recompute.on) == ([False], True)


def test_what_cannot_be_measured_recomputes_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def forward(row: dict[str, torch.Tensor]) -> Any:
        raise KeyError("pixel_values")

    recompute = deciding(load(folder), 1 << 40, forward=forward)
    recompute.prepare(8, 8)
    recompute.prepare(8, 8)
    assert recompute.on
    assert caplog.text.count("could not be measured") == 1


def test_a_model_that_cannot_recompute_is_refused_for_true_and_left_alone_by_auto(folder: Path) -> None:
    model = load(folder)
    model.supports_gradient_checkpointing = False
    with pytest.raises(Unsupported, match="LlamaForCausalLM cannot recompute"):
        Recompute(model, True, "cpu")
    recompute = deciding(model, 0)
    recompute.prepare(10**9)
    assert not recompute.on
    with pytest.raises(ArgumentError, match="must be True, False or 'auto'"):
        Recompute(model, "always", "cpu")  # type: ignore[arg-type]


# gradients


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradients_are_the_same_on_off_and_after_switching(folder: Path, lora: bool) -> None:
    model = load(folder, lora=lora)
    wanted = gradients(model)
    recompute = deciding(model, 0)
    for free, on in ((0, True), (1 << 40, False), (0, True)):
        recompute._free = lambda device, free=free: free
        recompute.prepare(18, 9)
        assert recompute.on is on
        found = gradients(model)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_recomputation_keeps_less(folder: Path) -> None:
    model = load(folder)
    whole = kept_by(model, 4, 60)
    Recompute(model, True, "cpu")
    assert kept_by(model, 4, 60) < whole / 3


def test_a_context_is_entered_around_forward_and_recomputation(folder: Path) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def noted(what: str) -> Iterator[None]:
        entered.append(what)
        yield

    model = load(folder)
    Recompute(model, True, "cpu", context_fn=lambda: (noted("forward"), noted("again")))
    gradients(model)
    assert entered == ["forward"] * 2 + ["again"] * 2


# out of memory


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_pass_that_runs_out_of_memory_is_made_again_with_the_same_dropout(
    folder: Path, caplog: pytest.LogCaptureFixture, error: RuntimeError
) -> None:
    recompute = deciding(load(folder), 1 << 40)
    recompute.prepare(90, 9)
    drawn: list[float] = []

    def forward() -> bool:
        drawn.append(float(torch.rand(())))
        if not recompute.on:
            raise error
        return recompute.on

    assert recompute.run(forward)
    assert drawn[0] == drawn[1]
    assert "a pass of 90 tokens ran out of memory" in caplog.text
    for tokens, on in ((80, False), (90, True), (89, False), (200, True)):
        recompute.prepare(tokens, 9)
        assert recompute.on is on


def test_other_errors_and_a_second_failure_are_raised(folder: Path) -> None:
    recompute = deciding(load(folder), 1 << 40)
    recompute.prepare(8, 8)

    def broken() -> None:
        raise RuntimeError("shapes do not match")

    def hungry() -> None:
        raise torch.OutOfMemoryError("still")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        recompute.run(broken)
    assert not recompute.on
    with pytest.raises(torch.OutOfMemoryError):
        recompute.run(hungry)
    assert recompute.on


# free memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    500 kB\n"}


def test_free_host_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert free_host_bytes(write(tmp_path, MEMINFO)) == 500 * 1024


def test_the_limit_of_a_container_is_nearer(tmp_path: Path) -> None:
    v2 = {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 30\n"}
    root = write(tmp_path / "2", MEMINFO | {f"sys/fs/cgroup/{name}": text for name, text in v2.items()})
    assert free_host_bytes(root) == 130
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert free_host_bytes(root) == 500 * 1024
    v1 = {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "1200", "memory.stat": "x 1\n"}
    root = write(tmp_path / "1", MEMINFO | {f"sys/fs/cgroup/memory/{name}": text for name, text in v1.items()})
    assert free_host_bytes(root) == 0


def test_free_memory_of_places_that_do_not_tell_is_unknown(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
    assert free_bytes(torch.device("meta")) is None

"""Passes of one model fit into the memory that is free: they are cut, or refused with the figures."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import distance, lora, make_rows

from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError, CapacityError
from twinkle.loss import Loss
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers import memory
from twinkle_transformers.batches import positions
from twinkle_transformers.losses import needs_of
from twinkle_transformers.memory import free_host_bytes, own_limit, saved_bytes
from twinkle_transformers.passes import PassKind
from twinkle_transformers.sampling.runner import Runner

ROWS = make_rows(12, (9, 30, 17, 24), seed=3)
PLENTY = 1 << 40
ROUNDING = 2e-6
"""Of float32 gradients that are summed in another order: 12 rows of up to 30 tokens, relative to their norm. Measured
3e-7; a row that is left out, or counted twice, changes the gradient by a tenth or more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def opened(folder: Path, free: int | None = PLENTY, mode: Any = "auto", **options: Any) -> Any:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(folder), mixed_precision="no", gradient_checkpointing=mode, **options)
    model.add_adapter_to_model("a", lora())
    set_free(model, free)
    return model


def set_free(model: Any, free: int | None) -> None:
    model._passes.recompute._free = lambda device: free


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.model.parameters() if p.grad is not None])


def watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the rows, and the bytes that are needed at least, of each pass from now on."""
    found: list[tuple[int, int]] = []
    made = model._passes._pass

    def note(group: Any, status: Any, rows: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        found.append((len(rows), needed(model, rows, training=status is group.train_status)))
        return made(group, status, rows, batch, *rest, **options)

    monkeypatch.setattr(model._passes, "_pass", note)
    return found


def common(model: Any, *, training: bool) -> PassKind:
    group = model.optimizer_group["a"]
    group.loss()
    status = group.train_status if training else group.eval_status
    return PassKind("a", needs_of(group, status, False), training)


def needed(model: Any, rows: Any, *, training: bool, recomputed: bool = True) -> int:
    budget, which = model._passes.budget, common(model, training=training)
    batch = model._passes.batch(model.optimizer_group["a"], rows)
    kept = budget._kept(positions(batch), which, recomputed and model._passes.recompute.possible)
    assert kept is not None
    return int(kept + budget.beside(batch, which))


def of_short(free: int) -> int:
    """Return what must be free so that a pass may take so many bytes."""
    return int(free / 0.8) + 8


# cutting


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["auto", True, False])
@pytest.mark.parametrize("rows", [3, 5])
def test_a_batch_is_cut_until_every_pass_fits_and_its_gradient_stays(
    folder: Path, mode: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(folder, mode=mode)
    before = whole.forward_backward(inputs=ROWS)
    model = opened(folder, mode=mode)
    limit = max(needed(model, ROWS[start : start + rows], training=True) for start in range(12 - rows))
    assert needed(model, ROWS, training=True) > limit
    set_free(model, of_short(limit))
    passes = watched(model, monkeypatch)
    after = model.forward_backward(inputs=ROWS)
    assert sum(count for count, _ in passes) == 12
    assert len(passes) > 1
    assert all(size <= limit for _, size in passes)
    assert distance(gradients(model), gradients(whole)) <= ROUNDING
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert after["num_tokens"] == before["num_tokens"]
    torch.testing.assert_close(after["logps"], before["logps"], rtol=1e-5, atol=1e-5)
    norms = [m.clip_grad_norm(1.0) for m in (whole, model)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert model.optimizer_group["a"].pending == whole.optimizer_group["a"].pending


@pytest.mark.full
def test_arguments_of_rows_are_cut_with_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    arguments = {
        "advantages": torch.randn(12, generator=draw).tolist(),
        "old_logps": [(-torch.rand(len(row["input_ids"]), generator=draw)).tolist() for row in ROWS],
    }
    found = []
    for cut in (False, True):
        model = opened(folder)
        model.set_loss("GRPOLoss")
        if cut:
            set_free(model, of_short(needed(model, ROWS[:4], training=True)))
        passes = watched(model, monkeypatch)
        model.forward_backward(inputs=ROWS, **arguments)
        assert (len(passes) > 1) is cut
        found.append(gradients(model))
    assert distance(found[1], found[0]) <= ROUNDING


@pytest.mark.full
def test_recomputation_comes_before_cutting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(tiny_model(tmp_path, num_hidden_layers=8))  # of two layers, recomputation saves nothing
    set_free(model, of_short(needed(model, ROWS, training=True)))
    passes = watched(model, monkeypatch)
    model.forward_backward(inputs=ROWS)
    assert [rows for rows, _ in passes] == [12]
    assert model._passes.recompute.on


def test_the_cut_is_logged_with_its_reason(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = opened(folder)
    set_free(model, of_short(max(needed(model, half, training=True) for half in (ROWS[:6], ROWS[6:]))))
    with caplog.at_level(logging.INFO):
        model.forward_backward(inputs=ROWS)
    assert "12 rows are computed in 2 passes: more at a time would not fit into the free memory" in caplog.text


@pytest.mark.full
def test_scores_without_a_graph_are_cut_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(folder)
    before = model.forward_only(inputs=ROWS)
    limit = needed(model, ROWS[:4], training=False)
    set_free(model, of_short(limit))
    passes = watched(model, monkeypatch)
    after = model.forward_only(inputs=ROWS)
    assert len(passes) > 1
    assert all(size <= limit for _, size in passes)
    torch.testing.assert_close(after["logps"], before["logps"], rtol=1e-5, atol=1e-5)
    base = model.forward_only(inputs=ROWS, disable_lora=True)["logps"]  # nothing is trained, and it is measured
    assert len(passes) > 4
    set_free(model, PLENTY)
    torch.testing.assert_close(base, model.forward_only(inputs=ROWS, disable_lora=True)["logps"], rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_logits_that_are_returned_count_for_the_passes_that_follow(folder: Path) -> None:
    model = opened(folder)
    logits = 30 * model.model.config.vocab_size * 4
    one = needed(model, ROWS[1:2], training=False) + 2 * logits
    set_free(model, of_short(one + 13 * 12 * logits))
    assert model.forward_only(inputs=ROWS, return_logits=True)["logits"].shape[:2] == (12, 30)
    set_free(model, of_short(one))  # of the second row, the longest: what the first one leaves is too much
    with pytest.raises(CapacityError, match="needs about"):
        model.forward_only(inputs=ROWS, return_logits=True)
    model.forward_only(inputs=ROWS)


# refusing


@pytest.mark.full
def test_a_row_that_does_not_fit_alone_is_refused_with_the_figures(folder: Path) -> None:
    model = opened(folder)
    model.forward_backward(inputs=ROWS[:1])
    held = gradients(model)
    size = needed(model, ROWS[1:2], training=True)
    free = int(size / 0.8) - 8
    set_free(model, free)
    with pytest.raises(CapacityError) as caught:
        model.forward_backward(inputs=ROWS)
    text = str(caught.value)
    assert text.startswith("adapter 'a': a pass over 1 row of up to 30 tokens (30 positions) needs about ")
    assert f"{size:,} bytes, and {free:,} are free, of which it may take 80%; give shorter rows" in text
    assert torch.equal(gradients(model), held)  # nothing was computed
    set_free(model, PLENTY)
    model.forward_backward(inputs=ROWS)
    set_free(model, 1)
    with pytest.raises(CapacityError, match="1 row of up to"):
        model.forward_only(inputs=ROWS)


class Pairs(Loss):
    """Compares rows two by two."""

    rows_together = 2

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        sums = outputs["logps"].sum(-1)
        return LossOutput(-torch.nn.functional.logsigmoid(sums[::2] - sums[1::2]).sum(), len(sums) // 2)


class Whole(Pairs):
    """Compares all rows."""

    rows_together = 1
    splittable = False


@pytest.mark.full
def test_rows_that_belong_together_stay_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = opened(folder)
    whole.set_loss(Pairs())
    whole.forward_backward(inputs=ROWS)
    model = opened(folder)
    model.set_loss(Pairs())
    limit = max(needed(model, ROWS[at : at + 2], training=True) for at in range(0, 12, 2))
    set_free(model, of_short(limit))
    passes = watched(model, monkeypatch)
    model.forward_backward(inputs=ROWS)
    assert {rows for rows, _ in passes} == {2}
    assert distance(gradients(model), gradients(whole)) <= ROUNDING
    model.set_loss(Whole())
    with pytest.raises(CapacityError, match=r"12 rows of up to 30 tokens .* the loss compares all rows of a call"):
        model.forward_backward(inputs=ROWS)


def test_a_forward_whose_graph_is_kept_is_not_cut_but_refused(folder: Path) -> None:
    model = opened(folder)
    set_free(model, of_short(needed(model, ROWS[:6], training=True)))
    with pytest.raises(CapacityError, match="call forward_backward, which computes them in several passes"):
        model.forward(inputs=ROWS)
    model.forward(inputs=ROWS[:2])


# what is measured is what runs


def kept_by(model: Any, rows: Any, *, training: bool = True) -> int:
    """Return the bytes that the body of a real pass keeps for its backward."""
    group = model.optimizer_group["a"]
    own = {t.untyped_storage().data_ptr() for t in [*model.model.parameters(), *model.model.buffers()]}
    batch = model._passes.batch(group, rows)
    model.model.train()
    backbone = model.backbone
    arguments = {k: v for k, v in batch.items() if k in backbone.inputs and isinstance(v, torch.Tensor)}
    arguments = batch.join(arguments) if positions(batch).packed else arguments
    return saved_bytes(lambda _: backbone._hidden(arguments, batch), 0, own)


def rows_of(path: str) -> list[dict[str, Any]]:
    if path == "padded":
        return ROWS
    prompt = make_rows(1, 40, seed=7)[0]["input_ids"]
    return [{"input_ids": [*prompt, *row["input_ids"][:8]], "labels": [-100] * 40 + row["labels"][:8]} for row in ROWS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", ["padded", "prefixes", "prefixes off"])
def test_the_estimate_is_that_of_the_path_that_runs(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(folder, share_prefixes=False if path == "padded" else "auto")
    if path == "prefixes off":
        monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "prefixes")
    rows = rows_of(path)
    batch = model._passes.batch(model.optimizer_group["a"], rows)
    size = positions(batch)
    assert size.packed is (path == "prefixes")
    assert size.tokens == {"padded": 12 * 30, "prefixes": 40 + 12 * 8, "prefixes off": 12 * 48}[path]
    predicted = model._passes.recompute.needed_bytes(size.tokens, size.width, "a", size.masked, packed=size.packed)
    missing = sum(p.numel() * 4 for p in model.model.parameters() if p.requires_grad)
    # Keys and values of a shared prefix are gathered beside what one sequence alone keeps.
    assert 0.75 <= (predicted - missing) / kept_by(model, rows) <= 1.25


@pytest.mark.full
def test_sampling_whole_decodes_as_many_at_once_as_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    params = {"max_tokens": 6, "seed": 1, "num_samples": 2, "stop": []}
    wide = TorchSampler(folder)
    wanted = wide.sample(rows, params)
    assert wide._service.whole._bytes is not None
    one = wide._service.whole._bytes[1].needed(36, 30)
    narrow = TorchSampler(folder, cache_bytes=3 * one)
    widths: list[int] = []
    step = type(narrow._service.whole).__mro__[0]._at_once
    monkeypatch.setattr(
        type(narrow._service.whole), "_at_once",
        lambda self, *given: (widths.append(step(self, *given)), widths[-1])[1],
    )  # fmt: skip
    found = narrow.sample(rows, params)
    assert widths == [3]
    assert [[s.tokens for s in r.sequences] for r in found] == [[s.tokens for s in r.sequences] for r in wanted]
    with pytest.raises(CapacityError, match=r"row 1: 36 tokens need about .* MiB, but the sampler may use"):
        TorchSampler(folder, cache_bytes=one - 1).sample(rows, params)


def test_scores_of_a_prompt_count_for_what_sampling_whole_may_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    row = {"input_ids": make_rows(1, 500, seed=1)[0]["input_ids"]}
    params = {"max_tokens": 2, "seed": 1, "stop": []}
    plain = TorchSampler(folder)
    plain.sample([row], params)
    limit = plain._service.whole._bytes[1].needed(502, 500)
    logits = 500 * plain._service.source.base.config.vocab_size * 4
    narrow = TorchSampler(folder, cache_bytes=limit + logits)
    narrow.sample([row], params)
    with pytest.raises(CapacityError, match="502 tokens and the scores of their prompt need about"):
        narrow.sample([row], params | {"prompt_logprobs": 1})
    roomy = TorchSampler(folder, cache_bytes=limit + 3 * logits)
    assert len(roomy.sample([row], params | {"prompt_logprobs": 1})[0].prompt_logprobs) == 500


# what is free


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    500 kB\n", "proc/self/status": "VmRSS:\t 100 kB\n"}


def test_the_limit_of_the_control_group_that_the_process_is_in_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    own = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{base}/jobs/memory.max": "max\n",
        f"{base}/jobs/mine/memory.max": "300000\n",
        f"{base}/jobs/mine/memory.current": "120000\n",
        f"{base}/jobs/mine/memory.stat": "inactive_file 20000\n",
    }
    assert free_host_bytes(write(tmp_path / "2", MEMINFO | own)) == 200_000
    base = "sys/fs/cgroup/memory"
    own = {
        "proc/self/cgroup": "5:cpu:/jobs/other\n4:memory:/jobs/mine\n0::/\n",
        f"{base}/jobs/memory.limit_in_bytes": "250000\n",
        f"{base}/jobs/memory.usage_in_bytes": "120000\n",
    }
    assert free_host_bytes(write(tmp_path / "1", MEMINFO | own)) == 130_000


def test_a_limit_of_ones_own_counts_what_the_process_has_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path, MEMINFO)
    monkeypatch.setenv(memory.LIMIT, "300kB".replace("k", "K"))
    assert free_host_bytes(root) == 300_000 - 100 * 1024
    monkeypatch.setenv(memory.LIMIT, "50KB")
    assert free_host_bytes(root) == 0
    monkeypatch.setenv(memory.LIMIT, "1TB")
    assert free_host_bytes(root) == 500 * 1024


@pytest.mark.parametrize(
    ("text", "size"), [("", None), ("4000", 4000), ("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("512MiB", 2**29)]
)
def test_a_limit_is_a_size(text: str, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.LIMIT, text)
    assert own_limit() == size


def test_a_limit_that_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.LIMIT, "plenty")
    with pytest.raises(ArgumentError, match=r"TWINKLE_MEMORY_LIMIT must be a size such as 4GB.*got 'plenty'"):
        own_limit()

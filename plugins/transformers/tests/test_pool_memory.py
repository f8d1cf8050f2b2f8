"""Passes fit into memory before they are made, one that fails costs its own operation alone, and costs are exact."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import distance, lora, make_rows, open_pool
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from twinkle.data_format import LossOutput
from twinkle.engine import Operation, OperationError, OperationResult, Usage
from twinkle.errors import CapacityError
from twinkle.loss import Loss
from twinkle.testing import tiny_model
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.memory import saved_bytes
from twinkle_transformers.pool.passes import ForwardPass, UsageMeter
from twinkle_transformers.pool.pool import LoraPool
from twinkle_transformers.pool.work import MicroBatch

NAMES = ("a", "b", "c")
ROWS = {"a": make_rows(4, 9, seed=0), "b": make_rows(3, (12, 5, 8), seed=1), "c": make_rows(1, 30, seed=2)}
PLENTY = 1 << 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def opened(folder: Path, free: int | None = PLENTY, mode: Any = "auto", **options: Any) -> LoraPool:
    model = open_pool(folder, gradient_checkpointing=mode, **options)
    for at, name in enumerate(NAMES):
        model.add_adapter_to_model(name, lora(2 + at, lora_dropout=0.2 if name == "b" else 0.0), seed=at)
    set_free(model.pool, free)
    return model.pool


def set_free(pool: LoraPool, free: int | None) -> None:
    pool.passes.recompute._free = lambda device: free


def operations(*names: str, kind: Any = "forward_backward") -> list[Operation]:
    return [Operation(name, kind, ROWS[name]) for name in names or NAMES]


def watched(pool: LoraPool) -> list[tuple[int, bool]]:
    """Return a list that gets tokens, and whether they are recomputed, of each pass that is made from now on."""
    found: list[tuple[int, bool]] = []
    forward = pool.passes.forward

    def watch(parts: list[MicroBatch], free: int | None = None) -> ForwardPass:
        forward_pass = forward(parts, free)
        found.append((forward_pass.stream.routing.total, forward_pass.recomputed))
        return forward_pass

    pool.passes.forward = watch  # type: ignore[method-assign]
    return found


def gradients(pool: LoraPool) -> dict[str, torch.Tensor]:
    return {name: pool.tenants[name].flat.grad.clone() for name in NAMES if pool.tenants[name].flat.grad is not None}


def expected(folder: Path) -> dict[str, torch.Tensor]:
    pool = opened(folder)
    assert all(isinstance(result, OperationResult) for result in pool.run(operations()))
    return gradients(pool)


def parts_of(pool: LoraPool, *names: str) -> list[MicroBatch]:
    return [part for at, op in enumerate(operations(*names)) for part in pool.prepare(at, op).parts]


def needed(pool: LoraPool, *names: str, recomputed: bool) -> int:
    found = pool.admission.needed(parts_of(pool, *names or NAMES), recomputed=recomputed)
    assert found is not None
    return found


# what a pass needs


def kept_by(pool: LoraPool, parts: list[MicroBatch]) -> int:
    """Return the bytes that a real pass keeps for its way back, hidden states of the head included."""
    model = pool.backbone.model
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    own |= {tenant.flat.untyped_storage().data_ptr() for tenant in pool.tenants}
    return saved_bytes(lambda _: pool.passes.forward(parts), 0, own)


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [False, True])
def test_what_a_pass_keeps_is_predicted(folder: Path, recomputed: bool) -> None:
    pool = opened(folder, mode=recomputed)
    parts = parts_of(pool, *NAMES)
    head = sum(part.tokens for part in parts) * pool.backbone.model.config.hidden_size * 4
    load = pool.passes.load(parts)
    assert load.tokens == 4 * 9 + 25 + 30
    predicted = pool.passes.recompute.needed_bytes(load.tokens, load.width, masked=False, recomputed=recomputed)
    kept = kept_by(pool, parts)
    assert predicted is not None
    if recomputed:  # one layer is there on the way back, when its turn comes
        whole = pool.passes.recompute.needed_bytes(load.tokens, load.width, masked=False)
        assert whole is not None
        assert kept < whole / 4
        predicted -= whole // pool.backbone.model.config.num_hidden_layers
    assert 0.85 <= predicted / (kept - head) <= 1.25


def test_what_is_beside_activations_is_counted(folder: Path) -> None:
    pool = opened(folder)
    size, vocabulary, hidden = (
        pool.tenants["a"].flat.numel(), pool.backbone.model.config.vocab_size, pool.backbone.model.config.hidden_size,
    )  # fmt: skip
    [part] = parts_of(pool, "a")
    head = 36 * hidden * 4 + 2 * 36 * vocabulary * 4
    assert pool.passes.load([part]).beside == 4 * size + 8 * size + head  # a copy; the pass's gradients and those kept
    pool.tenants["a"].reserve_gradient()
    assert pool.passes.load([part]).beside == 4 * size + 4 * size + head
    [part] = pool.prepare(0, Operation("a", "forward", ROWS["a"], options={"return_logits": True})).parts
    assert pool.passes.load([part]).beside == 4 * size + 3 * 36 * vocabulary * 4


def test_an_adapter_wider_than_any_before_is_measured_anew(folder: Path) -> None:
    pool = opened(folder)
    before = needed(pool, "a", recomputed=False)
    pool.add("same", lora(4))
    assert needed(pool, "a", recomputed=False) == before
    pool.add("wide", lora(64))
    assert needed(pool, "a", recomputed=False) > before


# recomputation


@pytest.mark.full
def test_recomputation_changes_no_number(folder: Path) -> None:
    pool = opened(folder, mode=True)
    passes = watched(pool)
    pool.run(operations())
    assert passes == [(91, True)]
    assert not any(module.training for module in pool.backbone.model.modules())
    wanted = expected(folder)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(pool).items())


# admission


@pytest.mark.full
def test_what_does_not_fit_is_recomputed_first_and_then_made_in_smaller_passes(folder: Path) -> None:
    wanted = expected(folder)
    probe = opened(folder)
    off, on = needed(probe, recomputed=False), needed(probe, recomputed=True)
    alone = needed(probe, "c", recomputed=True)
    assert alone < on < off
    for free, told in [
        (off, [(91, False)]),
        (on, [(91, True)]),
        (alone, [(9, True)] * 4),  # what follows depends on sizes; see below
    ]:
        pool = opened(folder, int(free / 0.8) + 8)
        passes = watched(pool)
        results = pool.run(operations())
        assert all(isinstance(result, OperationResult) for result in results), results
        if free != alone:
            assert passes == told
        else:
            assert len(passes) > 1
            assert sum(tokens for tokens, _ in passes) == 91
        for name, gradient in gradients(pool).items():
            assert distance(gradient, wanted[name]) <= 2e-6
        assert [round(result.denominator) for result in results if isinstance(result, OperationResult)] == [32, 22, 29]


@pytest.mark.full
def test_without_recomputation_passes_are_smaller_at_once(folder: Path) -> None:
    probe = opened(folder, mode=False)
    pool = opened(folder, int(needed(probe, recomputed=False) / 0.8) - 8, mode=False)
    passes = watched(pool)
    pool.run(operations())
    assert len(passes) == 2
    assert not any(recomputed for _, recomputed in passes)
    wanted = expected(folder)
    assert all(distance(gradient, wanted[name]) <= 2e-6 for name, gradient in gradients(pool).items())


def test_a_part_that_fits_nowhere_fails_alone_with_the_figures(folder: Path) -> None:
    wanted = expected(folder)
    pool = opened(folder)
    size = needed(pool, "c", recomputed=True)
    set_free(pool, int(size / 0.8) - 8)
    results = pool.run(operations())
    assert isinstance(results[2], OperationError)
    assert isinstance(results[2].error, CapacityError)
    free = int(size / 0.8) - 8
    assert str(results[2].error).startswith("adapter 'c': a pass over 1 row of 30 tokens needs about ")
    assert f"and {free:,} are free, of which it may take 80 %" in str(results[2].error)
    found = gradients(pool)
    assert found.keys() == {"a", "b"}
    assert all(distance(found[name], wanted[name]) <= 2e-6 for name in found)
    assert pool.tenants["c"].group.pending == 0
    set_free(pool, PLENTY)
    pool.run(operations("c"))
    assert distance(gradients(pool)["c"], wanted["c"]) <= 2e-6


def test_base_rows_and_forwards_are_admitted_too(folder: Path) -> None:
    pool = opened(folder)
    rows = make_rows(8, 20, seed=4)
    forward = [Operation(None, "forward", rows), Operation("a", "forward", rows)]
    whole = pool.run(forward)
    parts = [part for at, op in enumerate(forward) for part in pool.prepare(at, op).parts]
    size = pool.admission.needed(parts, recomputed=False)
    assert size is not None
    set_free(pool, size // 3)
    passes = watched(pool)
    for one, other in zip(whole, pool.run(forward), strict=True):
        assert isinstance(one, OperationResult)
        assert isinstance(other, OperationResult)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            torch.testing.assert_close(a["logps"], b["logps"], rtol=1e-5, atol=1e-5)
    assert len(passes) > 2
    set_free(pool, 1)
    assert all("CapacityError" in repr(r.error) for r in pool.run(forward) if isinstance(r, OperationError))


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
def test_rows_that_belong_together_stay_together(folder: Path) -> None:
    pool = opened(folder)
    whole = pool.run([Operation("a", "forward_backward", ROWS["a"], Pairs())])[0]
    wanted = gradients(pool)["a"]
    assert isinstance(whole, OperationResult)
    size = needed(pool, "a", recomputed=True)
    for loss in (Pairs(), Whole()):
        pool = opened(folder, size)  # of which it may take 80 %
        passes = watched(pool)
        result = pool.run([Operation("a", "forward_backward", ROWS["a"], loss)])[0]
        if isinstance(loss, Whole):
            assert isinstance(result, OperationError)
            assert isinstance(result.error, CapacityError)
            continue
        assert [tokens for tokens, _ in passes] == [18, 18]
        assert isinstance(result, OperationResult)
        assert result.loss_sum == pytest.approx(whole.loss_sum, rel=1e-6)
        assert distance(gradients(pool)["a"], wanted) <= 2e-6


@pytest.mark.full
def test_what_cannot_be_measured_is_let_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = opened(folder, 1)
    monkeypatch.setattr(pool.passes.recompute, "_measure", lambda *_: None)
    assert all(isinstance(result, OperationResult) for result in pool.run(operations()))
    pool = opened(folder, None)
    assert all(isinstance(result, OperationResult) for result in pool.run(operations()))


# memory that runs out all the same


def failing(pool: LoraPool, when: Callable[[int, int], bool], *, back: bool = False) -> list[int]:
    """Let passes run out of memory; returns the list of tokens of all that were begun."""
    begun: list[int] = []
    body, backward = pool.passes._body, pool.passes.backward

    def forward_of(stream: Any) -> Any:
        begun.append(stream.routing.total)
        if not back and when(len(begun), begun[-1]):
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return body(stream)

    def backward_of(forward_pass: ForwardPass) -> None:
        if back and when(len(begun), begun[-1]):
            backward(forward_pass)  # all is done, and then it fails
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        backward(forward_pass)

    pool.passes._body, pool.passes.backward = forward_of, backward_of  # type: ignore[method-assign]
    return begun


@pytest.mark.sample(2)
@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("nth", "mode"), [(2, "auto"), (3, False)])
def test_memory_that_runs_out_in_every_nth_pass_costs_nobody_anything(
    folder: Path, nth: int, back: bool, mode: Any
) -> None:
    pool = opened(folder, mode=mode, tokens_per_pass=40)
    pool.admission.needed(parts_of(pool, "a"), recomputed=True)  # what is measured is no pass
    failing(pool, lambda count, _: count % nth == 0, back=back)
    for _ in range(3):
        results = pool.run(operations())
        assert all(isinstance(result, OperationResult) for result in results), results
    wanted = expected(folder)
    assert distance(gradients(pool)["a"], 3 * wanted["a"]) <= 5e-6
    assert [pool.tenants[name].group.pending for name in NAMES] == [3, 3, 3]


@pytest.mark.full
@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_a_part_that_cannot_run_alone_fails_alone(folder: Path, back: bool) -> None:
    wanted = expected(folder)
    pool = opened(folder, mode=False)
    needed(pool, recomputed=False)
    begun = failing(pool, lambda _, tokens: tokens >= 30, back=back)
    results = pool.run(operations())
    assert [type(result) for result in results] == [OperationResult, OperationResult, OperationError]
    assert isinstance(results[2].error, CapacityError)
    assert str(results[2].error).startswith("adapter 'c': a pass over 1 row of 30 tokens ran out of memory")
    assert isinstance(results[2].error.__cause__, torch.OutOfMemoryError)
    found = gradients(pool)
    assert found.keys() == {"a", "b"}
    assert all(distance(found[name], wanted[name]) <= 2e-6 for name in found)
    assert begun[0] == 91
    assert begun.count(30) == 2


@pytest.mark.full
def test_errors_hold_on_to_no_pass(folder: Path) -> None:
    pool = opened(folder, mode=False)
    needed(pool, recomputed=False)
    begun: list[weakref.ref[torch.Tensor]] = []
    forward = pool.passes.forward

    def noted(parts: list[MicroBatch], free: int | None = None) -> ForwardPass:
        forward_pass = forward(parts, free)
        begun.append(weakref.ref(forward_pass.stream.ids))
        return forward_pass

    pool.passes.forward = noted  # type: ignore[method-assign]

    def bad(inputs: Any, outputs: Any) -> LossOutput:
        raise OSError("no loss today")

    harmed = Operation("b", "forward_backward", ROWS["b"], bad)
    results = pool.run([*operations("a"), harmed])
    failing(pool, lambda _, tokens: tokens >= 30, back=True)
    results += pool.run([*operations("a", "c"), harmed])
    assert [isinstance(result, OperationError) for result in results] == [False, True, False, True, True]
    gc.collect()
    assert len(begun) > 4
    assert all(ids() is None for ids in begun)


# what operations cost


def numbers_of(folder: Path) -> int:
    """Return the numbers that a token of the tiny Qwen3 meets, from its configuration."""
    c = AutoConfig.from_pretrained(folder)
    heads, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (heads + 2 * groups) + heads * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    return int(c.num_hidden_layers * layer + c.hidden_size * c.vocab_size)


def usage_of(result: Any) -> tuple[Any, ...]:
    assert isinstance(result, OperationResult), result
    return astuple(result.usage)


def test_usage_is_the_formula(folder: Path) -> None:
    base = numbers_of(folder)
    for mode, times, flops in ((False, 1, lambda p, own: 4 * p + 6 * own), (True, 2, lambda p, own: 6 * p + 8 * own)):
        pool = opened(folder, mode=mode)
        adapter = pool.tenants["a"].plan.layout.parameters
        assert usage_of(pool.run(operations("a"))[0]) == (36, 36 * times, 0, 36 * flops(base, adapter))
        forward = pool.run(operations("a", kind="forward"))[0]
        assert usage_of(forward) == (36, 36, 0, 36 * 2 * (base + adapter))
        assert usage_of(pool.run([Operation(None, "forward", ROWS["a"])])[0]) == (36, 36, 0, 36 * 2 * base)


@pytest.mark.full
def test_usage_does_not_depend_on_cuts_or_neighbours(folder: Path) -> None:
    pool = opened(folder)
    alone = [usage_of(pool.run([operation])[0]) for operation in operations()]
    assert [usage_of(result) for result in pool.run(operations())] == alone
    small = opened(folder, tokens_per_pass=20)
    assert [usage_of(result) for result in small.run(operations())] == alone


def test_of_rows_with_a_shared_prefix_tokens_are_whole_and_computed_once(folder: Path) -> None:
    pool = opened(folder)
    prompt = make_rows(1, 40, seed=7)[0]["input_ids"]
    rows = [{"input_ids": [*prompt, 1 + at, 2], "labels": [-100] * 39 + [1 + at, 2, -100]} for at in range(4)]
    [result] = pool.run([Operation("a", "forward_backward", rows)])
    tokens, computed, padded, flops = usage_of(result)
    assert (tokens, computed, padded) == (4 * 42, 40 + 4 * 2, 0)
    assert flops == computed * (4 * numbers_of(folder) + 6 * pool.tenants["a"].plan.layout.parameters)


def test_tokens_that_fill_up_a_pass_are_somebodys(folder: Path) -> None:
    pool = opened(folder)
    short = make_rows(1, 3, seed=1)
    assert usage_of(pool.run([Operation("a", "forward_backward", short)])[0])[:3] == (3, 3, 5)
    results = pool.run([Operation("a", "forward_backward", short), Operation(None, "forward", short)])
    assert [usage_of(result)[:3] for result in results] == [(3, 3, 0), (3, 3, 2)]
    assert usage_of(pool.run(operations("c"))[0])[2] == 0


def test_experts_are_counted_that_a_token_goes_to() -> None:
    c = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    costs = UsageMeter(AutoModelForCausalLM.from_config(c))
    attention = 32 * 8 * (4 + 2 * 2) + 4 * 8 * 32
    assert costs.base == 2 * (attention + 32 * 6 + 2 * 3 * 32 * 16) + 32 * 64
    layout = Layout.of([("q_proj", Shape(4, 32, 32, 1.0)), ("experts.down_proj", Shape(4, 16, 32, 1.0, experts=6))])
    assert costs.of_adapter(layout) == 4 * 64 + 2 * 4 * 48


def test_totals_are_the_sum_of_results_and_belong_to_one_adapter(folder: Path) -> None:
    pool = opened(folder)
    total = Usage()
    for kind in ("forward_backward", "forward"):
        for result in pool.run(operations("a", "b", kind=kind))[:1]:
            assert isinstance(result, OperationResult)
            total += result.usage
    assert pool.usage("a") == total
    pool.page("a", "disk")
    assert pool.usage("a") == total
    assert pool.bytes_of("a").disk  # asking brings nobody back
    outside = [{"input_ids": [10**6], "labels": [1]}]
    assert isinstance(pool.run([Operation("a", "forward", outside)])[0], OperationError)
    assert pool.usage("a") == total
    pool.usage("a").tokens += 1
    assert pool.usage("a") == total
    pool.remove("a")
    pool.add("a", lora())
    assert pool.usage("a") == Usage()


def test_the_references_of_a_loss_are_computed_but_are_no_tokens_of_the_rows(folder: Path) -> None:
    pool = opened(folder)
    own = pool.tenants["a"].plan.layout.parameters
    arguments = {"ref_logps": "base"}
    [result] = pool.run([Operation("a", "forward_backward", ROWS["a"], "DPOLoss", arguments)])
    tokens, computed, _, flops = usage_of(result)
    assert (tokens, computed) == (36, 72)
    assert flops == 36 * (6 * numbers_of(folder) + 6 * own)

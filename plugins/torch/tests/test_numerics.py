"""A fast path is on where rounding explains what differs, and off where it does not, whatever the dtype."""

import pytest
import torch
from torch import Tensor

from twinkle.errors import SettingsError
from twinkle_testing.other_machine import RoundsByRows
from twinkle_torch.numerics import (
    FAST_PATHS,
    TOKEN_FACTOR,
    InFloat64,
    RoundingNoise,
    disabled,
    judge,
    measured_rounding,
    probe_tokens,
)

ROWS, SIZE = 12, 64
HALVES = (range(6), range(6, 12))


def weights(dtype: torch.dtype) -> Tensor:
    """Return a matrix that amplifies rounding: its columns nearly cancel."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layers(x: Tensor) -> Tensor:
    w = weights(x.dtype)
    for _ in range(6):
        x = torch.nn.functional.layer_norm(torch.tanh(x @ w) + x, (SIZE,))
    return x


def by_halves(x: Tensor) -> Tensor:
    return torch.cat([layers(x[:6]), layers(x[6:])])


def leaking(x: Tensor) -> Tensor:
    """Let each row see a hundredth of the mean of all rows."""
    return layers(x + 0.01 * x.mean(0))


def changed(x: Tensor) -> list[tuple[Tensor, range]]:
    other = inputs(x.dtype, seed=2)
    first, second = x.clone(), x.clone()
    first[:6], second[6:] = other[:6], other[6:]
    return [(first, HALVES[1]), (second, HALVES[0])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_rounding_is_no_fault(dtype: torch.dtype) -> None:
    def noisy(x: Tensor) -> Tensor:
        with RoundingNoise(7):
            return by_halves(x)

    x = inputs(dtype)
    found = judge("packing", noisy, by_halves, x, changed(x))
    assert found.exact, found.reason
    assert found.difference > 0
    assert found.method == ("float64" if dtype == torch.bfloat16 else "rounding")
    assert 0 < found.units <= TOKEN_FACTOR
    assert f"at most {found.units:.1f} times the rounding of a token (limit 16)" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_see_a_hundredth_of_each_other_are_a_fault(dtype: torch.dtype) -> None:
    x = inputs(dtype)
    found = judge("packing", leaking, leaking, x, changed(x))
    assert not found.exact
    assert "its sequences see each other" in found.reason
    assert found.moved > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_that_is_wrong_for_each_row_alone_is_a_fault(dtype: torch.dtype) -> None:
    x = inputs(dtype)
    found = judge("packing", lambda rows: layers(rows * 1.02), layers, x, changed(x))
    assert not found.exact
    assert "differs from the plain path" in found.reason
    assert found.moved == 0.0


def test_equal_bits_need_no_further_run() -> None:
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(x)
        return layers(x)

    x = inputs(torch.bfloat16)
    found = judge("packing", counted, counted, x, changed(x))
    assert (found.exact, found.method, len(runs)) == (True, "equal bits", 4)


def test_a_path_that_cannot_be_decided_is_off_and_says_so() -> None:
    def only_bfloat16(x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("this kernel takes bfloat16 only")
        return leaking(x)

    x = inputs(torch.bfloat16)
    found = judge("packing", only_bfloat16, layers, x, changed(x))
    assert (found.exact, found.method) == (False, "undecided")
    assert "does not run in float64: this kernel takes bfloat16 only" in found.reason


def test_a_path_that_fails_gives_its_error_as_the_reason() -> None:
    def broken(x: Tensor) -> Tensor:
        raise ValueError("no rotary embedding")

    found = judge("steps", broken, layers, inputs(torch.float32))
    assert str(found) == "steps off: no rotary embedding"


def test_results_that_are_not_finite_are_a_fault() -> None:
    found = judge("head", lambda x: layers(x) / 0.0, layers, inputs(torch.float32))
    assert (found.exact, found.reason) == (False, "its results are not finite")


def test_float64_mode_equals_a_model_converted_to_float64() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.LayerNorm(SIZE), torch.nn.Linear(SIZE, 3))
    x = inputs(torch.float32)
    with torch.no_grad(), InFloat64():
        ours = model(x)
    assert ours.dtype == torch.float64
    assert torch.equal(ours, model.double()(x.double()))


def test_float64_mode_writes_into_buffers_of_the_caller() -> None:
    buffer = torch.zeros(2, 3)
    with torch.no_grad(), InFloat64():
        buffer[0] = torch.ones(3) / 3
        returned = buffer.mul_(3)
    assert returned is buffer
    assert torch.equal(buffer, torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_measured_rounding_covers_the_error_against_float64() -> None:
    x = inputs(torch.float32)
    rounding = measured_rounding(lambda: layers(x))
    with InFloat64():
        wide = layers(x)
    error = (layers(x).double() - wide).norm(dim=-1) / wide.norm(dim=-1)
    # 16 units is what `judge` allows; the noise is drawn for each product, as rounding is.
    assert bool((error <= 16 * rounding).all())
    assert float(rounding.max()) < 1e-3


def test_probe_tokens_stay_in_the_vocabulary_and_change_everywhere() -> None:
    for vocabulary in (2, 5, 256, 151936):
        one, two = probe_tokens(17, vocabulary), probe_tokens(17, vocabulary, changed=True)
        assert all(0 <= token < vocabulary for token in one + two)
        assert vocabulary < 5 or all(a != b for a, b in zip(one, two, strict=True))


def test_paths_are_disabled_by_name_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "packing, steps")
    assert [path for path in FAST_PATHS if disabled(path)] == ["packing", "steps"]
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "all")
    assert all(map(disabled, FAST_PATHS))
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "packign")
    with pytest.raises(SettingsError, match=r"must list some of packing, prefixes, steps, fused.*got packign"):
        disabled("packing")


OLD_RULE = 1e-4
"""A constant relative difference per token, which once decided whether packing was used."""


def amplifying(x: Tensor) -> Tensor:
    """Compute many layers, each of which makes what rounding moved larger."""
    w = weights(x.dtype)
    for _ in range(12):
        x = torch.nn.functional.layer_norm(torch.tanh(x @ w) + 0.3 * x, (SIZE,))
    return x


def test_packing_stays_on_where_another_machine_differs_by_more_than_a_constant_allows() -> None:
    def packed(x: Tensor) -> Tensor:
        return amplifying(x)

    def one_by_one(x: Tensor) -> Tensor:
        return torch.cat([amplifying(x[:6]), amplifying(x[6:])])

    x = inputs(torch.float32)
    with RoundsByRows(2.0):
        found = judge("packing", packed, one_by_one, x, changed(x))
    assert found.difference > OLD_RULE
    assert found.exact, found.reason


def test_a_leak_is_refused_on_another_machine_too() -> None:
    def leaks(x: Tensor) -> Tensor:
        return amplifying(x + 0.01 * x.mean(0))

    def one_by_one(x: Tensor) -> Tensor:
        return torch.cat([amplifying(x[:6]), amplifying(x[6:])])

    x = inputs(torch.float32)
    with RoundsByRows(2.0):
        found = judge("packing", leaks, one_by_one, x, changed(x))
    assert not found.exact
    assert "its sequences see each other" in found.reason


def test_float64_mode_computes_grouped_products() -> None:
    draw = torch.Generator().manual_seed(3)
    rows, wide, matrices = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((24, 16), (16, 24), (3, 16, 8))
    )
    ends = torch.tensor([8, 16, 24], dtype=torch.int32)
    with torch.no_grad(), InFloat64():
        product = torch._grouped_mm(rows, matrices, offs=ends)
        outer = torch._grouped_mm(wide, rows, offs=ends)
    spans = [(0, 8), (8, 16), (16, 24)]
    whole = [rows[a:b].double() @ matrices[i].double() for i, (a, b) in enumerate(spans)]
    torch.testing.assert_close(product, torch.cat(whole))
    torch.testing.assert_close(outer, torch.stack([wide[:, a:b].double() @ rows[a:b].double() for a, b in spans]))


def in_float64() -> bool:
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_kernels_of_half_precision_that_leak_less_than_their_rounding_are_a_fault(share: float) -> None:
    def fast(x: Tensor) -> Tensor:
        return layers(x if in_float64() else x + share * x.mean(0))

    x = inputs(torch.bfloat16)
    found = judge("packing", fast, layers, x, changed(x))
    assert not found.exact
    assert "see each other with the kernels of bfloat16: a token moves by" in found.reason


def test_kernels_that_do_not_repeat_themselves_are_judged_by_their_rounding() -> None:
    seeds = iter(range(100))

    def fast(x: Tensor) -> Tensor:
        with RoundingNoise(next(seeds)):
            return by_halves(x)

    x = inputs(torch.bfloat16)
    found = judge("packing", fast, by_halves, x, changed(x))
    assert found.exact, found.reason
    assert found.moved > 0


def test_a_path_for_which_float64_needs_too_much_memory_is_undecided_and_the_model_goes_on() -> None:
    def fast(x: Tensor) -> Tensor:
        if in_float64():
            raise torch.OutOfMemoryError("14 GiB are not free")
        return layers(x * 1.02)

    x = inputs(torch.bfloat16)
    found = judge("packing", fast, layers, x, changed(x))
    assert (found.exact, found.method) == (False, "undecided")
    assert "14 GiB are not free" in found.reason


def test_a_path_that_runs_out_of_memory_itself_raises() -> None:
    def fast(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        judge("packing", fast, layers, inputs(torch.bfloat16))


def test_float64_mode_copies_the_rows_of_an_embedding_that_it_needs_and_no_others() -> None:
    table = torch.nn.Embedding(1000, 8, dtype=torch.bfloat16)
    ids = torch.tensor([[3, 999]])
    with torch.no_grad(), InFloat64() as mode:
        rows = table(ids)
    assert rows.dtype == torch.float64
    assert torch.equal(rows, table.weight.double()[ids])
    assert mode._free == 2 << 30

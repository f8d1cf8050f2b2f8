"""Noise is a pure function of its counters, equals its definition in Python integers, and looks random."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle_transformers import noise
from twinkle_transformers.noise import keep_mask, masks_from, token_keys, uniform

WORDS = st.integers(-(2**63), 2**63 - 1)
LOW_64, LOW_32 = 2**64 - 1, 2**32 - 1


# --- the definition, in Python integers ---


def mix(z: int) -> int:
    """SplitMix64's finaliser."""
    z &= LOW_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & LOW_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & LOW_64
    return z ^ (z >> 31)


def chain(seed: int, *words: int) -> int:
    key = mix(seed * 0x9E3779B97F4A7C15)
    for word in words:
        key = mix(key + (word + 1) * 0x9E3779B97F4A7C15)
    return key


def element(key: int, site: int, feature: int) -> int:
    key ^= mix(site * 0x9E3779B97F4A7C15)
    x = ((key >> 32) + feature * 0x9E3779B9) & LOW_32
    x = (x ^ x >> 16) * 0x85EBCA6B & LOW_32
    x = x + key & LOW_32
    return (x ^ x >> 13) * 0xC2B2AE35 & LOW_32


def signed(word: int) -> int:
    return word - 2**32 if word >> 31 else word


@given(WORDS, st.lists(WORDS, max_size=3), st.lists(WORDS, min_size=1, max_size=9))
@settings(max_examples=50, deadline=None)
def test_uniform_is_the_top_24_bits_of_its_definition(seed: int, stream: list[int], index: list[int]) -> None:
    wanted = [(chain(seed, *stream, i) >> 40) / 2**24 for i in index]
    assert uniform(seed, stream, torch.tensor(index)).tolist() == wanted


@given(WORDS, WORDS, WORDS, st.lists(st.tuples(WORDS, WORDS), max_size=4), st.integers(0, 37), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_a_mask_is_its_definition(
    seed: int, operation: int, site: int, tokens: list[tuple[int, int]], features: int, probability: float
) -> None:
    rows, positions = (torch.tensor([t[i] for t in tokens], dtype=torch.int64) for i in (0, 1))
    mask = keep_mask(seed, operation, site, rows, positions, features, probability)
    words = [[signed(element(chain(seed, operation, *token), site, f)) for f in range(features)] for token in tokens]
    drawn = torch.tensor(words, dtype=torch.int32).view(len(tokens), features).float()
    kept = drawn >= torch.tensor(probability * 2.0**32 - 2.0**31)
    assert torch.equal(mask != 0, kept)
    assert torch.all((mask == 0) | (mask == torch.tensor(1 / (1 - probability))))


def test_the_first_numbers_never_change() -> None:
    assert [round(x * 2**24) for x in uniform(1, (2, 3), torch.arange(3)).tolist()] == [
        chain(1, 2, 3, i) >> 40 for i in range(3)
    ]
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from seed 0, as published


# --- purity ---


def mask_of(tokens: list[tuple[int, int]], features: int = 40, seed: int = 1) -> Tensor:
    rows, positions = torch.tensor(tokens).T
    return keep_mask(seed, 2, 3, rows, positions, features, 0.5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=30), st.randoms())
def test_a_token_has_its_mask_in_any_company_and_order(tokens: list[tuple[int, int]], random: Any) -> None:
    alone = {token: mask_of([token])[0] for token in tokens}
    shuffled = random.sample(tokens, len(tokens))
    for token, row in zip(shuffled, mask_of(shuffled), strict=True):
        assert torch.equal(row, alone[token])


def test_a_mask_of_fewer_features_is_the_beginning_of_a_wider_one() -> None:
    tokens = [(0, p) for p in range(20)]
    assert torch.equal(mask_of(tokens, 13), mask_of(tokens, 64)[:, :13])


def test_blocks_and_strides_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [(0, p) for p in range(50)]
    whole = mask_of(tokens)
    rows, positions = torch.tensor(tokens).repeat_interleave(2, 0).T
    assert torch.equal(keep_mask(1, 2, 3, rows[::2], positions[::2], 40, 0.5), whole)
    monkeypatch.setattr(noise, "_BLOCK", 41)
    assert torch.equal(mask_of(tokens), whole)


def test_keys_of_many_adapters_serve_one_call() -> None:
    first, second = [(0, 1), (0, 2)], [(0, 1), (4, 7), (4, 8)]
    keys = [token_keys(seed, 2, *torch.tensor(tokens).T) for seed, tokens in ((1, first), (9, second))]
    together = masks_from(torch.cat(keys), 3, 40, 0.5)
    assert torch.equal(together, torch.cat([mask_of(first), mask_of(second, seed=9)]))


def test_torch_s_own_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = mask_of([(0, 0)]), uniform(1, 2, torch.arange(5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(one[0], mask_of([(0, 0)]))
    assert torch.equal(one[1], uniform(1, 2, torch.arange(5)))


def test_arguments_are_left_as_they_were() -> None:
    rows, positions, index = torch.zeros(5, dtype=torch.int64), torch.arange(5), torch.arange(6).view(2, 3)
    keys = token_keys(1, 2, rows, positions)
    kept = keys.clone()
    assert uniform(1, 2, index).shape == (2, 3)
    masks_from(keys, 3, 8, 0.5)
    assert torch.equal(keys, kept)
    assert rows.tolist() == [0] * 5
    assert positions.tolist() == list(range(5))
    assert torch.equal(index, torch.arange(6).view(2, 3))


@pytest.mark.gpu
def test_every_device_makes_the_same_bits() -> None:
    rows, positions = torch.arange(300) // 50, torch.arange(300) % 50
    here = keep_mask(5, 6, 7, rows, positions, 1001, 0.1)
    assert torch.equal(keep_mask(5, 6, 7, rows.cuda(), positions.cuda(), 1001, 0.1).cpu(), here)
    assert torch.equal(uniform(5, 6, positions.cuda()).cpu(), uniform(5, 6, positions))


# --- statistics: limits are 4.5 to 5 standard deviations of fixed draws ---

COUNT = 1 << 18
SIDE = 512


def signs(**other: int) -> Tensor:
    """A mask of +-1 `[SIDE tokens, SIDE features]`."""
    counters = {"seed": 1, "operation": 2, "site": 3, "row": 0} | other
    row = torch.full((SIDE,), counters.pop("row"))
    return keep_mask(*counters.values(), row, torch.arange(SIDE), SIDE, 0.5) - 1


def deviations(a: Tensor, b: Tensor) -> float:
    """Correlation in standard deviations of that of independent numbers."""
    return abs((a * b).mean().item()) * math.sqrt(a.numel())


def test_uniform_numbers_have_the_moments_of_a_uniform_distribution() -> None:
    drawn = uniform(0, 0, torch.arange(COUNT)).double()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(1 / 12 / COUNT)
    assert abs(drawn.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / COUNT)
    assert abs(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1]) < 5 / math.sqrt(COUNT)


def test_every_bit_of_uniform_numbers_is_fair_and_bytes_are_even() -> None:
    words = (uniform(3, (1, 4), torch.arange(COUNT)) * 2**24).to(torch.int64)
    for bit in range(24):
        ones = (words >> bit & 1).double().mean()
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(COUNT)
    for shift in (0, 8, 16):
        counts = torch.bincount(words >> shift & 255, minlength=256).double()
        chi_square = ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum().item()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    "arguments",
    [((1, (2, 3)), (2, (2, 3))), ((1, (2, 3)), (1, (2, 4))), ((1, (2, 3)), (1, (3, 2))), ((1, 2), (2, 1))],
)
def test_neighbouring_seeds_and_streams_are_independent(arguments: tuple[Any, Any]) -> None:
    first, second = (uniform(*a, torch.arange(COUNT)) * math.sqrt(12) - math.sqrt(3) for a in arguments)
    assert deviations(first, second) < 5


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"seed": 1 + 2**40}, {"operation": 3}, {"site": 4}, {"site": -3}, {"site": 3 + 2**32}, {"row": 1}],
)
def test_masks_whose_counters_differ_are_independent(other: dict[str, int]) -> None:
    product = signs() * signs(**other)
    assert abs(product.mean().item()) * SIDE < 4.5
    for dim in (0, 1):  # for each token over features, for each feature over tokens
        assert product.mean(dim).abs().max().item() * math.sqrt(SIDE) < 5


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 31, 64, 128, 256])
def test_neighbouring_tokens_and_features_are_independent(distance: int) -> None:
    mask = signs()
    below, beside = mask[distance:] * mask[:-distance], mask[:, distance:] * mask[:, :-distance]
    assert deviations(mask[distance:], mask[:-distance]) < 4.5
    assert deviations(mask[:, distance:], mask[:, :-distance]) < 4.5
    assert deviations(mask[distance:, distance:], mask[:-distance, :-distance]) < 4.5
    assert deviations(below[:, distance:], below[:, :-distance]) < 4.5  # four corners of a rectangle
    assert deviations(beside[distance:], beside[:-distance]) < 4.5


def test_a_mask_has_the_spectrum_of_a_random_matrix() -> None:
    """The largest singular value of n x n independent signs is 2 sqrt(n), give or take n^(-1/6) (Bai and Yin 1993)."""
    sites = torch.cat([keep_mask(1, 2, s, torch.tensor([0]), torch.tensor([5]), SIDE, 0.5) - 1 for s in range(SIDE)])
    for mask in (signs(), signs(row=9), sites):
        assert torch.linalg.matrix_norm(mask, 2).item() / math.sqrt(SIDE) == pytest.approx(2, abs=0.08)


@pytest.mark.parametrize("probability", [0.001, 0.05, 0.1, 0.5, 0.9, 0.999])
def test_elements_are_dropped_with_their_probability_and_keep_the_mean(probability: float) -> None:
    mask = keep_mask(1, 2, 3, torch.zeros(SIDE, dtype=torch.int64), torch.arange(SIDE), SIDE, probability)
    error = 5 * math.sqrt(probability * (1 - probability)) / SIDE
    assert abs((mask == 0).double().mean().item() - probability) < error
    assert abs(mask.double().mean().item() - 1) < error / (1 - probability)


def test_no_two_of_many_masks_are_alike() -> None:
    rows, positions = torch.arange(4096) // 64, torch.arange(4096) % 64
    words = keep_mask(0, 0, 0, rows, positions, 64, 0.5).bool()
    assert max(Counter(map(tuple, words.tolist())).values()) == 1
    keys = sorted(token_keys(0, 0, rows, positions).tolist())
    assert all(a != b for a, b in pairwise(keys))


# --- limits and bad input ---


@pytest.mark.parametrize(("probability", "value"), [(0.0, 1.0), (1.0, 0.0)])
def test_certainty_needs_no_noise(probability: float, value: float) -> None:
    mask = keep_mask(1, 2, 3, torch.arange(3), torch.arange(3), 5, probability)
    assert torch.equal(mask, torch.full((3, 5), value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("block", [1 << 16, 16])
def test_masks_of_other_dtypes_drop_the_same_elements(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "_BLOCK", block)
    keys = token_keys(1, 2, torch.arange(9), torch.arange(9))
    mask = masks_from(keys, 3, 5, 0.3, dtype)
    assert mask.dtype == dtype
    assert torch.equal(mask, masks_from(keys, 3, 5, 0.3).to(dtype))


@pytest.mark.parametrize(("tokens", "features"), [(0, 5), (5, 0), (0, 0)])
def test_empty_masks(tokens: int, features: int) -> None:
    assert keep_mask(1, 2, 3, torch.arange(tokens), torch.arange(tokens), features, 0.5).shape == (tokens, features)


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_a_probability_outside_its_range_is_refused(probability: float) -> None:
    with pytest.raises(ArgumentError, match="probability"):
        keep_mask(1, 2, 3, torch.arange(2), torch.arange(2), 3, probability)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: uniform(1, 2, torch.arange(3.0)), "index is torch.float32"),
        (lambda: token_keys(1, 2, torch.arange(3).int(), torch.arange(3)), "rows is torch.int32"),
        (lambda: token_keys(1, 2, torch.arange(3), torch.arange(4)), r"rows \[3\] and positions \[4\]"),
        (lambda: masks_from(torch.arange(3), 1, 4, 0.5, torch.int64), "torch.int64"),
        (lambda: masks_from(torch.arange(3), 1, -4, 0.5), "features -4"),
        (lambda: masks_from(torch.zeros(3), 1, 4, 0.5), "keys is torch.float32"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(call: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call()


def test_seeds_are_whole_numbers_of_any_size() -> None:
    index = torch.arange(3)
    assert torch.equal(uniform(2**64 + 5, 1, index), uniform(5, 1, index))
    with pytest.raises(TypeError):
        uniform(1.5, 1, index)  # type: ignore[arg-type]

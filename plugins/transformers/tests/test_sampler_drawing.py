"""Drawing tokens: filters, frequencies, log-probabilities, noise, stopping."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twinkle.testing import tiny_tokenizer
from twinkle_transformers.sampling.requests import StopRule
from twinkle_transformers.sampling.sampling_ops import (
    draw,
    log_probs,
    penalize,
    sorted_distribution,
    uniform,
    with_logprobs,
)


def logits_of(seed, rows=3, size=40):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 99), temperature=st.floats(0.2, 3), top_k=st.integers(1, 60), top_p=st.floats(0.05, 1))
def test_filters_keep_what_the_reference_keeps(seed, temperature, top_k, top_p):
    logits = logits_of(seed)
    probs, ids = sorted_distribution(logits, temperature, top_k, top_p)
    ours = torch.zeros(logits.shape, dtype=torch.float64).scatter(-1, ids, probs)
    ours = ours / ours.sum(-1, keepdim=True)
    reference = TemperatureLogitsWarper(temperature)(None, logits)
    reference = TopKLogitsWarper(top_k)(None, reference)
    reference = TopPLogitsWarper(top_p)(None, reference) if top_p < 1 else reference
    torch.testing.assert_close(ours, reference.double().softmax(-1), rtol=1e-5, atol=1e-7)


def test_the_penalty_is_the_published_one():
    logits, ids = logits_of(1), torch.tensor([[1, 2, 2], [3, 4, 5], [0, 0, 0]])
    seen = torch.zeros(logits.shape, dtype=torch.bool).scatter(-1, ids, True)
    reference = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    torch.testing.assert_close(penalize(logits, seen, 1.7), reference)


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}])
def test_tokens_come_as_often_as_they_are_probable(filters):
    logits = logits_of(5, rows=1, size=12)
    count = 20_000
    noise = torch.tensor([uniform(17, 0, sample, 0) for sample in range(count)], dtype=torch.float64)
    drawn = draw(logits.expand(count, -1), noise, temperature=1.3, **filters).bincount(minlength=12).double()
    probs, ids = sorted_distribution(logits, 1.3, **filters)
    expected = torch.zeros(12, dtype=torch.float64).scatter(-1, ids[0], probs[0] / probs.sum()) * count
    assert drawn[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((drawn - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_temperature_zero_takes_the_largest_logit():
    logits = logits_of(2)
    assert draw(logits, torch.full((3,), 0.999), temperature=0).tolist() == logits.argmax(-1).tolist()


def test_a_temperature_near_zero_does_not_overflow():
    logits = logits_of(2) * 1e4
    noise = torch.tensor([0.0, 0.5, 1 - 2**-48], dtype=torch.float64)
    assert draw(logits, noise, temperature=1e-6).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_the_ends_of_the_noise_never_draw_an_impossible_token(filters):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    noise = torch.tensor([0.0, 1 - 2**-48], dtype=torch.float64)
    assert set(draw(logits, noise, temperature=1.0, **filters).tolist()) <= {1, 2}


def test_noise_depends_on_each_argument_and_on_nothing_else():
    base = (5, 1, 2, 3)
    assert uniform(*base) == uniform(*base)
    others = [uniform(*(value + (place == index) for place, value in enumerate(base))) for index in range(4)]
    assert len({uniform(*base), *others}) == 5
    values = torch.tensor([uniform(0, row, 0, at) for row in range(50) for at in range(100)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(values.var() - 1 / 12) < 0.005


def test_seeds_of_any_size_and_sign_serve():
    assert len({uniform(seed, 0, 0, 0) for seed in (-1, 0, 1, 2**63, 2**64 - 2)}) == 5


def test_the_drawn_token_comes_first_then_the_most_probable_others():
    table = log_probs(logits_of(3, rows=2), 0.5)
    best = table.argsort(-1, descending=True)
    tokens = torch.tensor([best[0, 5], best[1, 1]])
    rows = with_logprobs(table, tokens, 3)
    assert [[token for token, _ in row] for row in rows] == [
        [best[0, 5], best[0, 0], best[0, 1]],
        [best[1, 1], best[1, 0], best[1, 2]],
    ]
    assert rows[0][0][1] == pytest.approx(table[0, best[0, 5]].item())
    assert [len(row) for row in with_logprobs(table, tokens, 1)] == [1, 1]


def stops_after(rule, text, tokenizer):
    watch = rule.watch()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for index, token in enumerate(tokens):
        if watch.ends(token):
            return tokens[: index + 1]
    return None


def test_a_stop_string_is_found_across_tokens_at_its_last_one():
    tokenizer = tiny_tokenizer()
    rule = StopRule(strings=("\n\nQ:", "END"), tokenizer=tokenizer)
    tokens = stops_after(rule, "4.\n\nQ: next END", tokenizer)
    assert tokenizer.decode(tokens) == "4.\n\nQ:"
    assert rule.trim(tokens) == "4."


def test_stop_strings_of_several_bytes_a_character():
    tokenizer = tiny_tokenizer()
    rule = StopRule(strings=("星。",), tokenizer=tokenizer)
    tokens = stops_after(rule, "小星星。後", tokenizer)
    assert tokenizer.decode(tokens) == "小星星。"
    assert rule.trim(tokens) == "小星"


def test_a_stop_string_is_found_behind_bytes_that_are_no_text():
    tokenizer = tiny_tokenizer()
    rule = StopRule(strings=("ab",), tokenizer=tokenizer)
    noise = [tokenizer.convert_tokens_to_ids(token) for token in ("Ð",) * 40]
    watch = rule.watch()
    assert not any(watch.ends(token) for token in noise)
    assert [watch.ends(token) for token in tokenizer.encode("ab", add_special_tokens=False)] == [False, True]


def test_a_special_token_may_be_a_stop_string():
    tokenizer = tiny_tokenizer()
    rule = StopRule(strings=("<|im_end|>",), tokenizer=tokenizer)
    tokens = stops_after(rule, "done<|im_end|>more", tokenizer)
    assert tokens[-1] == 258
    assert rule.trim(tokens) == "done"


def test_a_stop_token_is_not_part_of_the_text():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    rule = StopRule(token_ids=frozenset(tokens[1:]), tokenizer=tokenizer)
    assert stops_after(rule, "abab", tokenizer) == tokens
    assert rule.trim(tokens) == "a"


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="abc \né星", max_size=30), stop=st.text(alphabet="abc \né星", min_size=1, max_size=3))
def test_the_watch_ends_exactly_where_the_whole_text_first_holds_the_string(text, stop):
    tokenizer = tiny_tokenizer()
    rule = StopRule(strings=(stop,), tokenizer=tokenizer)
    tokens = stops_after(rule, text, tokenizer)
    at = text.find(stop)
    if at < 0:
        assert tokens is None
    else:
        assert tokenizer.decode(tokens) == text[: at + len(stop)]
        assert rule.trim(tokens) == text[:at]

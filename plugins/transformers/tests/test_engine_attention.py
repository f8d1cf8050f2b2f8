"""Attention to a slotted store against a loop over single tokens in float64."""

import pytest
import torch

from twinkle_transformers.sampling.attention import AttentionMetadata, CacheScope, TokenSpan
from twinkle_transformers.sampling.kv_cache import KVCache, LayerShape

HEADS, GROUPS, SIZE = 4, 2, 8


class NoSwitch:
    def on(self):
        pass

    def off(self):
        pass


def store_of(slots, capacity, seed=0):
    store = KVCache([LayerShape((GROUPS, SIZE), (GROUPS, SIZE - 2), torch.float32)], torch.device("cpu"))
    store.resize(slots, capacity)
    generator = torch.Generator().manual_seed(seed)
    for pool in (store.keys[0], store.values[0]):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return store


def by_hand(q, keys, values, token_spans, *, scale, window, softcap, sinks):
    """Every token alone, in float64, from the store as it is after writing."""
    out = torch.zeros(len(q), HEADS, values.shape[-1], dtype=torch.float64)
    for stretch in token_spans:
        for n in range(stretch.count):
            row, last = stretch.first + n, stretch.start + n
            first = 0 if window is None else max(0, last - window + 1)
            for head in range(HEADS):
                group = head * GROUPS // HEADS
                k = keys[stretch.slot, group, first : last + 1].double()
                scores = (k @ q[row, head].double()) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[None]])
                weights = scores.softmax(0)[: last + 1 - first]
                out[row, head] = weights @ values[stretch.slot, group, first : last + 1].double()
    return out


def case(name):
    """Stretches (slot, start, first, count), in the order of the stream, and rows of padding behind them."""
    return {
        "decode": ([(0, 5, 0, 1), (1, 5, 1, 1), (2, 5, 2, 1)], 0),
        "uneven decode": ([(0, 3, 0, 1), (1, 9, 1, 1), (2, 6, 2, 1)], 0),
        "very uneven decode": ([(0, 2, 0, 1), (1, 30, 1, 1), (2, 2, 2, 1), (3, 1, 3, 1), (4, 3, 4, 1)], 0),
        "decode out of order with holes": ([(7, 4, 0, 1), (0, 6, 1, 1), (3, 2, 2, 1)], 5),
        "slots far apart": ([(0, 4, 0, 1), (19, 7, 1, 1)], 0),
        "beginning": ([(1, 0, 0, 4), (0, 0, 4, 4), (2, 0, 8, 1)], 0),
        "going on": ([(1, 6, 0, 5), (0, 2, 5, 2)], 1),
        "everything": ([(3, 0, 0, 3), (0, 4, 3, 1), (1, 5, 4, 4), (2, 0, 8, 2), (4, 9, 10, 1)], 5),
    }[name]


RULES = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "all": {"window": 4, "softcap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name",
    [
        "decode", "uneven decode", "very uneven decode", "decode out of order with holes", "slots far apart",
        "beginning", "going on", "everything",
    ],
)  # fmt: skip
def test_a_step_attends_as_each_token_alone(name, rule):
    found, padding = case(name)
    token_spans = [TokenSpan(*values) for values in found]
    total = sum(s.count for s in token_spans) + padding
    store = store_of(20, 40)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(total, HEADS, SIZE, generator=generator)
    k = torch.randn(total, GROUPS, SIZE, generator=generator)
    v = torch.randn(total, GROUPS, SIZE - 2, generator=generator)
    options = {"scale": 0.6, "window": None, "softcap": None, "sinks": None} | RULES[rule]
    before = store.keys[0].clone()
    scope = CacheScope(AttentionMetadata(token_spans, total, torch.device("cpu")), store, NoSwitch(), None)
    out = scope.attend(torch.nn.Identity(), q, k, v, **options, dropout=0.0)
    expected = by_hand(q, store.keys[0], store.values[0], token_spans, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for stretch in token_spans:
        assert torch.equal(
            store.keys[0][stretch.slot, :, stretch.start : stretch.stop], k[stretch.rows].transpose(0, 1)
        )
        before[stretch.slot, :, stretch.start : stretch.stop] = k[stretch.rows].transpose(0, 1)
    assert torch.equal(before, store.keys[0])


def test_lengths_that_lie_far_apart_are_served_apart():
    token_spans = [TokenSpan(*values) for values in case("very uneven decode")[0]]
    slot_ranges = AttentionMetadata(token_spans, len(token_spans), torch.device("cpu")).slot_ranges
    assert [(span.slots.start, span.slots.stop) for span in slot_ranges] == [(0, 1), (1, 2), (2, 4), (4, 5)]
    assert max(span.longest for span in slot_ranges if span.slots.start != 1) <= 4


def test_a_store_keeps_what_fits_when_it_is_resized():
    store = store_of(3, 6)
    before = store.keys[0].clone(), store.values[0].clone()
    store.resize(5, 9)
    assert torch.equal(store.keys[0][:3, :, :6], before[0])
    assert torch.equal(store.values[0][:3, :, :6], before[1])
    assert not store.keys[0][3:].any()
    store.resize(2, 4)
    assert torch.equal(store.keys[0], before[0][:2, :, :4])
    assert store.bytes == 2 * 4 * (GROUPS * SIZE + GROUPS * (SIZE - 2)) * 4


def test_a_store_copies_takes_and_puts_back_tokens():
    store = store_of(3, 6)
    keys = store.keys[0].clone()
    store.copy(0, 2, 4)
    assert torch.equal(store.keys[0][2, :, :4], keys[0, :, :4])
    assert torch.equal(store.keys[0][2, :, 4:], keys[2, :, 4:])
    taken = store.take(1, 2, 5)
    store.clear(1)
    assert not store.keys[0][1].any()
    store.put(1, 0, taken)
    assert torch.equal(store.keys[0][1, :, :3], keys[1, :, 2:5])

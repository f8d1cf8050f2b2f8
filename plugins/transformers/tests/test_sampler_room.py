"""Slots of an engine's store: what happens to keys and values as it grows, shrinks, is tidied or finds no memory."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import folder, rows, sampler_of, tokens_of  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.data_format import SamplingParams
from twinkle_transformers.sampling.kv_cache import KVCache, KVCacheManager, LayerShape
from twinkle_transformers.sampling.requests import Prompt, PromptScores, Request, StopRule

GREEDY: dict[str, Any] = {"temperature": 0, "stop": []}
CPU = torch.device("cpu")


def a_request() -> Request:
    """Return a request of one token and nine to come."""
    return Request(Prompt(0, [1], 10, PromptScores([1], SamplingParams())), SamplingParams(), StopRule(), 0, None)


def arrivals(draw: random.Random) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield prompts that begin like one another, and what is asked of each."""
    heads = [[draw.randrange(256) for _ in range(length)] for length in (5, 17, 40)]
    for _ in range(9):
        head = draw.choice(heads)
        ids = head[: draw.randrange(1, len(head) + 1)] + [draw.randrange(256) for _ in range(draw.randrange(4))]
        yield (
            ids,
            {"max_tokens": draw.choice([1, 3, 12, 90]), "num_samples": draw.choice([1, 1, 3]), "seed": 1, "stop": []},
        )


@pytest.mark.full
@pytest.mark.parametrize("number", [12, 19])
def test_answers_are_those_of_each_prompt_alone_whatever_comes_and_goes(folder: Path, number: int) -> None:
    draw = random.Random(number)
    limits = {"max_batch_size": 16, "cache_bytes": 280 * 512, "prefix_cache_bytes": draw.choice([0, 3 * 16 * 512])}
    sampler = sampler_of(folder, prefill_tokens=draw.choice([7, 50]), **limits)
    manager = sampler._service.engine.kv_manager
    wanted = []
    for ids, params in arrivals(draw):
        wanted.append((ids, params, sampler.submit(rows([ids])[0], params)))
        for _ in range(draw.randrange(12)):
            sampler.step()
            assert manager.store.bytes <= manager.budget
        if draw.random() < 0.3:
            draw.choice(wanted)[2].cancel()
    plain = sampler_of(folder, max_batch_size=1, prefix_cache_bytes=0)
    for ids, params, handle in wanted:
        (whole,) = tokens_of(plain.sample(rows([ids]), params))
        found = handle.result().sequences
        assert [s.tokens for s in found] == [
            tokens[: len(s.tokens)] if s.stop_reason == "abort" else tokens
            for s, tokens in zip(found, whole, strict=True)
        ]
    assert not manager.slots
    assert not manager.store.bytes


def test_a_store_at_its_limit_keeps_what_runs_whole(folder: Path) -> None:
    expected = tokens_of(sampler_of(folder).sample(rows([[1, 2, 3, 4]]), {**GREEDY, "max_tokens": 27}))
    sampler = sampler_of(folder, cache_bytes=250 * 512, prefix_cache_bytes=0)
    large = sampler.submit(rows([[5, 6, 7]])[0], {**GREEDY, "max_tokens": 120})
    drawn = large.tokens()
    for _ in range(50):
        next(drawn)
    running = sampler.submit(rows([[1, 2, 3, 4]])[0], {**GREEDY, "max_tokens": 27})
    for _ in range(20):
        next(drawn)
    assert sampler._service.engine.kv_manager.store.capacity > 64
    large.cancel()
    assert len(running._request.result.drafts[0].tokens) == 20
    several = sampler.submit(rows([[9, 8, 7, 6, 5]])[0], {**GREEDY, "max_tokens": 20}, num_samples=4)
    assert tokens_of([running.result()]) == expected
    several.result()


def test_a_store_grows_at_once_for_all_that_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(folder, max_batch_size=20, prefix_cache_bytes=0)
    store = sampler._service.engine.kv_manager.store
    shapes = []
    resize = store.resize

    def spied(slots: int, capacity: int) -> None:
        shapes.append(slots)
        resize(slots, capacity)

    monkeypatch.setattr(store, "resize", spied)
    sampler.sample(rows([[n, 2, 3] for n in range(6)]), {**GREEDY, "max_tokens": 4}, num_samples=3)
    assert shapes == [18, 0]
    shapes.clear()
    sampler.sample(rows([[n, 2, 3] for n in range(6)]), {**GREEDY, "max_tokens": 4}, num_samples=9)
    assert shapes == [20, 0]


def test_a_sequence_without_keys_and_values_may_be_moved() -> None:
    manager = KVCacheManager(KVCache([LayerShape((1, 2), (1, 2), torch.float32)], CPU), 1 << 20, 8)
    slots = [manager.allocate(a_request()) for _ in range(3)]
    manager.ensure_capacity(5)
    manager.store.keys[0][2] = 7
    last = manager.allocate(a_request())
    manager.free(slots[0])
    manager.free(slots[1])
    manager.ensure_capacity(5)
    assert sorted(slot.index for slot in manager.slots) == [0, 1]
    assert bool((manager.store.keys[0][slots[2].index] == 7).all())
    assert last.index != slots[2].index


def test_a_store_without_memory_for_all_its_layers_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = KVCache([LayerShape((2, 4), (1, 6), torch.float32)], CPU)
    store.resize(2, 8)
    store.keys[0].fill_(1)
    store.values[0].fill_(2)
    zeros, made = torch.zeros, []

    def scarce(*shape: int, **kwargs: Any) -> torch.Tensor:
        made.append(shape)
        if len(made) == 2:
            raise MemoryError
        return zeros(*shape, **kwargs)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(MemoryError):
        store.resize(3, 8)
    store.keys[0].fill_(3)
    store.values[0].fill_(4)
    store.resize(4, 8)
    assert bool((store.keys[0][:2] == 3).all())
    assert bool((store.values[0][:2] == 4).all())


def test_an_interrupt_while_a_prompt_is_copied_leaves_no_slot_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, max_batch_size=2, prefix_cache_bytes=0)
    store = sampler._service.engine.kv_manager.store
    params = {"max_tokens": 4, "seed": 1, "stop": []}
    expected = tokens_of(sampler.sample(rows([[1, 2, 3, 4, 5]]), params, num_samples=5))
    copy = store.copy

    def interrupted(source: int, target: int, tokens: int) -> None:
        monkeypatch.setattr(store, "copy", copy)
        raise KeyboardInterrupt

    several = sampler.submit(rows([[1, 2, 3, 4, 5]])[0], params, num_samples=5)
    monkeypatch.setattr(store, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        several.result()
    other = sampler.submit(rows([[9, 9]])[0], params)
    assert tokens_of([several.result()]) == expected
    other.result()
    assert not sampler._service.engine.kv_manager.slots

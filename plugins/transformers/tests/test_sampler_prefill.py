"""TorchSampler as an engine: how the prompts that are read share the tokens of a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samplers import PROMPTS, assert_same_scores, folder, rows, sampler_of, tokens_of  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.data_format import SamplingParams
from twinkle_transformers.sampling.prefill import shared, whole
from twinkle_transformers.sampling.requests import Prompt, PromptScores, Request, StopRule

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "stop": []}
LONG = torch.randint(0, 256, (130,), generator=torch.Generator().manual_seed(3)).tolist()


def spy(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Return a list that grows by the first position and the number of tokens that each step reads of each sequence."""
    steps: list[list[tuple[int, int]]] = []
    runner = sampler._service.runner
    read = runner.read

    def counted(pieces: Any, store: Any) -> Any:
        steps.append([(piece.start, len(piece.tokens)) for piece in pieces])
        return read(pieces, store)

    monkeypatch.setattr(runner, "read", counted)
    return steps


def reader(length: int, read: int = 0, salt: str | None = None) -> Request:
    """Return a request whose prompt is partly read."""
    ids, params = list(range(length)), SamplingParams()
    request = Request(Prompt(0, ids, 1, PromptScores(ids, params)), params, StopRule(), 1, None, salt)
    request.read = read
    return request


READERS = st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["ana", "bob", None])), max_size=9)


@given(READERS, st.integers(1, 60))
def test_a_step_is_full_the_oldest_prompt_goes_on_and_owners_have_equal_shares(
    sizes: list[tuple[int, str | None]], budget: int
) -> None:
    readers = [reader(length, salt=salt) for length, salt in sizes]
    counts = shared(readers, budget)
    assert all(0 <= counts[request] <= len(request.prompt.ids) for request in readers)
    assert sum(counts.values()) == min(budget, sum(length for length, _ in sizes))
    if not readers:
        return
    assert counts[readers[0]] >= min(max(1, budget // 4), len(readers[0].prompt.ids))
    owners = {salt for _, salt in sizes}
    rest = budget - max(1, budget // 4)
    for owner in owners:
        own = [request for request in readers if request.cache_salt == owner]
        needed = sum(len(request.prompt.ids) for request in own)
        assert sum(counts[request] for request in own) >= min(needed, rest // len(owners))
        others = own[1:] if own[0] is readers[0] else own
        unread = [len(request.prompt.ids) for request in others if not counts[request]]
        assert all(len(request.prompt.ids) <= min(unread, default=90) for request in others if counts[request])


@given(READERS, st.integers(1, 60), st.data())
def test_pieces_that_are_whole_are_cut_at_the_same_places(
    sizes: list[tuple[int, str | None]], size: int, data: st.DataObject
) -> None:
    readers = [reader(length, data.draw(st.integers(0, length - 1)), salt) for length, salt in sizes]
    for first in [None, *readers[:1]]:
        counts = whole(readers, size, first)
        assert sum(counts.values()) <= size
        assert not readers or any(counts.values())
        assert first is None or counts[first]
        for request, count in counts.items():
            stop = request.read + count
            assert not count or stop == len(request.prompt.ids) or stop % size == 0


def test_a_short_prompt_has_its_first_token_while_a_long_one_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, prefill_tokens=10)
    steps = spy(sampler, monkeypatch)
    long = sampler.submit(rows([LONG])[0], GREEDY)
    sampler.step()
    short = sampler.submit(rows([[1, 2, 3]])[0], GREEDY)
    sampler.step()
    assert steps == [[(0, 10)], [(10, 7), (0, 3)]]
    assert len(short.progress().tokens) == 1
    assert long.progress().tokens == []
    expected = [tokens_of(sampler_of(folder).sample(rows([ids]), GREEDY))[0] for ids in (LONG, [1, 2, 3])]
    assert [tokens_of([handle.result()])[0] for handle in (long, short)] == expected


def test_a_long_prompt_is_read_while_short_ones_keep_arriving(folder: Path) -> None:
    sampler = sampler_of(folder, prefill_tokens=8, prefix_cache_bytes=0)
    long = sampler.submit(rows([LONG])[0], GREEDY)
    steps = 0
    while not long.progress().tokens:
        sampler.submit(rows([[*range(steps, steps + 6)]])[0], GREEDY)
        sampler.step()
        steps += 1
    assert steps <= len(LONG) // 2 + 1, "a quarter of the tokens of a step are for the oldest prompt"


def test_an_owner_with_many_prompts_does_not_hold_up_another(folder: Path) -> None:
    sampler = sampler_of(folder, prefill_tokens=16, prefix_cache_bytes=0)
    many = [sampler.submit(rows([[number, *PROMPTS[3]]])[0], GREEDY, cache_salt="ana") for number in range(12)]
    one = sampler.submit(rows([PROMPTS[3] + PROMPTS[8]])[0], GREEDY, cache_salt="bob")
    while not one.progress().tokens:
        sampler.step()
    assert sum(handle.done for handle in many) <= 5, "they had more than twice the tokens"


def test_a_short_prompt_does_not_wait_for_a_long_one_that_begins_like_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt waits for a common beginning only where that is most of what the other one still has to read."""
    sampler = sampler_of(folder, prefill_tokens=32, prefix_cache_bytes=0)
    steps = spy(sampler, monkeypatch)
    sampler.submit(rows([LONG])[0], GREEDY)
    short = sampler.submit(rows([[*LONG[:20], 1]])[0], GREEDY)
    sampler.step()
    assert steps == [[(0, 11), (0, 21)]]
    assert len(short.progress().tokens) == 1


def test_a_prompt_that_is_cut_is_bit_equal_alone_and_among_others_where_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"temperature": 0, "max_tokens": 4, "logprobs": 3, "stop": []}
    options: dict[str, Any] = {"batch_invariant": True, "prefix_cache_bytes": 0, "prefill_tokens": 32}
    alone = sampler_of(folder, **options)
    (expected,) = alone.sample(rows([LONG]), params)
    sampler = sampler_of(folder, **options)
    steps = spy(sampler, monkeypatch)
    sampler.submit(rows([[1, 2, 3]])[0], {**params, "max_tokens": 1})
    long = sampler.submit(rows([LONG])[0], params)
    number = 0
    while not long.done:
        sampler.submit(rows([[*LONG[number : number + 5]]])[0], {**params, "max_tokens": 1})
        sampler.step()
        number += 1
    pieces = [piece for step in steps for piece in step if piece[1] > 5 or piece[0] == 128]
    assert pieces[:5] == [(0, 32), (32, 32), (64, 32), (96, 32), (128, 2)]
    assert_same_scores(sampler.model, LONG, expected.sequences[0], long.result().sequences[0])

"""TorchSampler as an engine: what is read once for several requests."""

import pytest
import torch
from samplers import PROMPTS, adapters, folder, module, rows, sampler_of, tokens_of  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.sampler import TorchSampler
from twinkle_transformers.loading import load_model


def spy(sampler, monkeypatch):
    """Count what each step reads."""
    steps = []
    runner = sampler._service.runner
    read = runner.read

    def counted(pieces, store):
        steps.append([len(piece.tokens) for piece in pieces])
        return read(pieces, store)

    monkeypatch.setattr(runner, "read", counted)
    return steps


def logprobs_by_forward(module, ids, temperature=1.0):
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ids])).logits[0].double()
    table = (logits / temperature).log_softmax(-1)
    return [table[at, token].item() for at, token in enumerate(ids[1:])]


def test_samples_of_a_prompt_read_it_once(folder, monkeypatch):
    sampler = sampler_of(folder, prefix_cache_bytes=0)
    _ = sampler._service.engine
    steps = spy(sampler, monkeypatch)
    sampler.sample(rows([PROMPTS[3]]), {"max_tokens": 4, "seed": 1, "stop": []}, num_samples=6)
    assert steps == [[40], [1] * 6, [1] * 6, [1] * 6]


def test_a_prompt_that_begins_like_an_earlier_one_is_not_read_twice(folder, monkeypatch):
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 5, "stop": [], "logprobs": 1}
    prompt = PROMPTS[3]
    expected = sampler.sample(rows([prompt]), params)[0].sequences[0]
    steps = spy(sampler, monkeypatch)
    again = sampler.sample(rows([prompt]), params)[0].sequences[0]
    assert steps[0] == [8]  # 32 of 40 are two blocks
    assert again.tokens == expected.tokens
    assert [p[0][1] for p in again.logprobs] == pytest.approx([p[0][1] for p in expected.logprobs], abs=1e-5)
    steps.clear()
    longer = prompt + expected.tokens + [7, 8, 9, 10]
    sampler.sample(rows([longer]), params)
    assert steps[0] == [49 - 32]
    steps.clear()
    sampler.sample(rows([longer]), params)
    assert steps[0] == [1]  # whole blocks, but one token is left to read
    sampler.reset_prefix_cache()
    steps.clear()
    sampler.sample(rows([prompt]), params)
    assert steps[0] == [40]


def test_prefixes_of_one_adapter_are_not_those_of_another(folder, adapters, monkeypatch):
    target, _ = adapters
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 5, "stop": []}
    fresh = [
        tokens_of(sampler_of(folder).sample(rows([PROMPTS[3]]), params, adapter_path=path))
        for path in (None, target / "small", target / "other")
    ]
    steps = spy(sampler, monkeypatch)
    for _ in range(2):
        for path, expected in zip((None, target / "small", target / "other"), fresh, strict=True):
            assert tokens_of(sampler.sample(rows([PROMPTS[3]]), params, adapter_path=path)) == expected
    assert [step[0] for step in steps if step[0] > 1] == [40, 40, 40, 8, 8, 8]


def test_prompt_logprobs_are_whole_also_where_the_prompt_is_known(folder, module):
    sampler = sampler_of(folder)
    params = {"max_tokens": 2, "seed": 1, "prompt_logprobs": 2}
    sampler.sample(rows([PROMPTS[3]]), {"max_tokens": 1})
    (response,) = sampler.sample(rows([PROMPTS[3]]), params)
    expected = logprobs_by_forward(module, PROMPTS[3])
    assert response.prompt_logprobs == [None, *(pytest.approx(value, abs=1e-4) for value in expected)]
    assert len(response.topk_prompt_logprobs) == 40


def test_kept_prefixes_stay_within_their_bytes_and_the_oldest_go(folder, monkeypatch):
    sampler = sampler_of(folder, prefix_cache_bytes=5 * 16 * 512)
    params = {"max_tokens": 1, "seed": 1}
    for start in range(4):
        sampler.sample(rows([list(range(start, start + 33))]), params)
    cache = sampler._service.engine.prefixes
    assert cache.bytes == 5 * 16 * 512
    steps = spy(sampler, monkeypatch)
    for start in (3, 2, 0):
        sampler.sample(rows([list(range(start, start + 33))]), params)
    assert steps == [[1], [1], [33]]


def test_weights_that_were_written_make_prefixes_worthless(folder):
    module, _ = load_model(folder)
    sampler = TorchSampler(model=module)
    params = {"temperature": 0, "max_tokens": 6}
    sampler.sample(rows([PROMPTS[3]]), params)
    with torch.no_grad():
        module.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    found = tokens_of(sampler.sample(rows([PROMPTS[3]]), params))
    assert found == tokens_of(TorchSampler(model=module).sample(rows([PROMPTS[3]]), params))


def test_a_prompt_is_shared_only_among_requests_with_the_same_salt(folder, monkeypatch):
    """Neither earlier prompts nor those that are read or decoded at the same time, and the numbers are the same."""
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 5, "stop": [], "logprobs": 1}
    row = rows([PROMPTS[3]])[0]
    (expected,) = sampler_of(folder, prefix_cache_bytes=0).sample([row], params)
    steps = spy(sampler, monkeypatch)
    for salt, read in (("ana", 40), ("bob", 40), (None, 40), ("ana", 8), ("bob", 8), (None, 8)):
        steps.clear()
        found = sampler.submit(row, params, cache_salt=salt).result()
        assert (steps[0], found.cached_tokens) == ([read], 40 - read)
        assert tokens_of([found]) == tokens_of([expected])
        scores, wanted = ([pairs[0][1] for pairs in one.sequences[0].logprobs] for one in (found, expected))
        assert scores == pytest.approx(wanted, abs=1e-5)
    fresh = sampler_of(folder, prefix_cache_bytes=0)
    steps = spy(fresh, monkeypatch)
    handles = [fresh.submit(row, params, cache_salt=salt) for salt in ("ana", "bob", "ana")]
    found = [handle.result() for handle in handles]
    assert steps[:2] == [[40, 40], [1, 1, 1]]  # the third has the same head as the first
    assert [response.cached_tokens for response in found] == [0, 0, 39]
    assert tokens_of(found) == tokens_of([expected]) * 3

"""TorchSampler as an engine: requests that arrive, wait, fail, are cancelled and interrupted."""

import threading
from functools import partial

import pytest
import torch
from samplers import PROMPTS, folder, rows, sampler_of, tokens_of  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import CapacityError, NonFiniteError
from twinkle.sampler import TorchSampler
from twinkle_transformers.loading import load_model
from twinkle_transformers.sampling.requests import StopRule


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


def test_a_request_that_arrives_during_decoding_has_a_token_before_the_others_finish(folder):
    sampler = sampler_of(folder, prefill_tokens=16)
    params = {"temperature": 0, "max_tokens": 30, "stop": []}
    first = sampler.submit(rows([[1, 2, 3]])[0], params)
    stream = first.tokens()
    for _ in range(3):
        next(stream)
    late = sampler.submit(rows([PROMPTS[3]])[0], params)
    token = next(late.tokens())
    assert not first.done
    assert token == late.result().sequences[0].tokens[0]


def test_a_long_prompt_is_read_in_pieces_beside_what_runs(folder, monkeypatch):
    sampler = sampler_of(folder, prefill_tokens=10)
    params = {"temperature": 0, "max_tokens": 30, "stop": []}
    running = sampler.submit(rows([[1, 2, 3]])[0], params)
    next(running.tokens())
    steps = spy(sampler, monkeypatch)
    late = sampler.submit(rows([PROMPTS[3]])[0], params)
    next(late.tokens())
    assert steps == [[1, 10], [1, 10], [1, 10], [1, 10]]
    assert len(running._request.result.drafts[0].tokens) == 5


@pytest.mark.full
def test_requests_wait_in_their_order_when_there_is_no_room(folder):
    roomy = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 20, "stop": []}
    expected = tokens_of(roomy.sample(rows(), params))
    store = roomy._service.engine.kv_manager.store
    sampler = sampler_of(folder, cache_bytes=130 * store.token_bytes, prefix_cache_bytes=0)
    handles = [sampler.submit(row, params) for row in rows()]
    finished = []
    while len(finished) < len(handles):
        until = partial(lambda known: sum(h.done for h in handles) > known, len(finished))
        sampler._service.engine.drive(until)
        assert len(sampler._service.engine._batch._running) <= 130 // 20
        assert store.bytes <= 130 * store.token_bytes
        finished += [n for n, h in enumerate(handles) if h.done and n not in finished]
    assert [tokens_of([h.result()])[0] for h in handles] == expected


def test_what_can_never_fit_is_refused_with_how_much_and_why(folder):
    sampler = sampler_of(folder, cache_bytes=20 * 512)
    assert sampler._service.engine.longest == 20
    with pytest.raises(CapacityError, match=r"row 1: 27 tokens need .*\(512 bytes per token\).* enough for 20"):
        sampler.sample(rows(PROMPTS[:2]), {"max_tokens": 7})
    (response,) = sampler.sample(rows(PROMPTS[:1]), {"temperature": 0, "stop": []})
    assert len(response.sequences[0].tokens) == 18  # nobody said how many, so as many as fit


@pytest.mark.full
def test_samples_of_one_prompt_leave_room_for_others(folder):
    sampler = sampler_of(folder, max_batch_size=3)
    many = sampler.submit(rows()[0], {"max_tokens": 10, "seed": 1, "stop": []}, num_samples=30)
    next(many.tokens())
    late = sampler.submit(rows()[4], {"max_tokens": 3, "seed": 1, "stop": []})
    late.result()
    assert not many.done
    assert len(tokens_of([many.result()])[0]) == 30


def test_a_cancelled_request_keeps_what_it_has_and_gives_its_slot_back(folder):
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 30, "stop": []}
    expected = tokens_of(sampler.sample(rows(PROMPTS[:2]), params))
    first, second = (sampler.submit(row, params) for row in rows(PROMPTS[:2]))
    stream = first.tokens()
    some = [next(stream) for _ in range(4)]
    first.cancel()
    assert first.done
    (sequence,) = first.result().sequences
    assert sequence.stop_reason == "abort"
    assert sequence.tokens == some == expected[0][0][:4]
    assert sequence.new_input_feature["input_ids"] == PROMPTS[0] + some
    assert len(sampler._service.engine.kv_manager.slots) == 1
    assert tokens_of([second.result()]) == expected[1:]
    assert not sampler._service.engine.kv_manager.slots
    assert sampler._service.engine.kv_manager.store.bytes == 0
    first.cancel()


def test_a_request_may_be_cancelled_before_it_begins(folder):
    sampler = sampler_of(folder)
    handle = sampler.submit(rows()[0], {"max_tokens": 5}, num_samples=2)
    handle.cancel()
    assert [s.stop_reason for s in handle.result().sequences] == ["abort", "abort"]
    assert handle.result().sequences[0].tokens == []
    assert list(handle.tokens()) == []


def test_broken_logits_of_one_request_leave_the_others_and_its_slot_clean(folder):
    module, _ = load_model(folder)
    with torch.no_grad():
        module.model.embed_tokens.weight[200].fill_(torch.nan)
    sampler = TorchSampler(model=module, max_batch_size=2)
    params = {"temperature": 0, "max_tokens": 8, "stop": [], "top_k": 100}
    sampler_alone = TorchSampler(model=module, max_batch_size=1)
    expected = tokens_of(sampler_alone.sample(rows([[1, 2, 3], [4, 5, 6, 7, 8]]), params))
    good, bad = sampler.submit(rows([[1, 2, 3]])[0], params), sampler.submit(rows([[9, 200, 9, 9, 9, 9]])[0], params)
    with pytest.raises(NonFiniteError, match="row 0: the model's logits are NaN"):
        bad.result()
    assert not good.done
    after = sampler.submit(rows([[4, 5, 6, 7, 8]])[0], params)  # takes the slot that held NaN
    assert tokens_of([good.result(), after.result()]) == expected


def test_a_step_that_fails_for_one_request_serves_the_others(folder, monkeypatch):
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 6, "stop": []}
    expected = tokens_of(sampler.sample(rows(PROMPTS[:3]), params))
    runner = sampler._service.runner
    read = runner.read

    def fails(pieces, store):
        if any(list(piece.tokens) == [13] for piece in pieces):
            raise RuntimeError("no memory for this one")
        return read(pieces, store)

    monkeypatch.setattr(runner, "read", fails)
    handles = [sampler.submit(row, params) for row in rows([*PROMPTS[:2], [13], PROMPTS[2]])]
    with pytest.raises(RuntimeError, match="no memory"):
        handles[2].result()
    assert tokens_of([handles[n].result() for n in (0, 1, 3)]) == expected
    assert not sampler._service.engine.kv_manager.slots


def test_a_tokenizer_that_fails_on_one_text_fails_one_request(folder):
    class Fails:
        def decode(self, tokens, skip_special_tokens):
            raise ValueError("no such piece")

    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 6}
    expected = tokens_of(sampler.sample(rows(PROMPTS[:2]), params))
    good, bad = (sampler.submit(row, params) for row in rows(PROMPTS[:2]))
    rule = StopRule(strings=("x",), tokenizer=Fails())
    for draft in bad._request.result.drafts:
        draft.watch = rule.watch()
    with pytest.raises(ValueError, match="no such piece"):
        bad.result()
    assert tokens_of([good.result()]) == expected[:1]


def test_an_interrupt_of_whoever_drives_loses_nobodys_request(folder, monkeypatch):
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 12, "stop": []}
    expected = tokens_of(sampler.sample(rows(PROMPTS[:2]), params))
    other = sampler.submit(rows()[1], params)
    runner = sampler._service.runner
    read = runner.read
    calls = []

    def interrupted(pieces, store):
        calls.append(len(pieces))
        found = read(pieces, store)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(runner, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(rows(PROMPTS[:1]), params)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(rows(PROMPTS[:1]), params)
    assert tokens_of([other.result()]) == expected[1:]
    assert not sampler._service.engine.kv_manager.slots


@pytest.mark.full
def test_calls_of_several_threads_run_in_one_batch(folder, monkeypatch):
    sampler = sampler_of(folder, prefix_cache_bytes=0)
    params = {"temperature": 0, "max_tokens": 40, "stop": []}
    expected = tokens_of(sampler.sample(rows(PROMPTS[:6]), params))
    steps = spy(sampler, monkeypatch)
    found = [None] * 6
    barrier = threading.Barrier(6)

    def call(number):
        barrier.wait()
        found[number] = tokens_of(sampler.sample(rows([PROMPTS[number]]), params))[0]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert max(map(len, steps)) > 1

"""TorchSampler as an engine: handles and streams, and requests at random."""

import pytest
import torch
from samplers import PROMPTS, adapters, folder, rows, sampler_of  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import ArgumentError
from twinkle.sampler import TorchSampler


def test_a_stream_gives_the_text_piece_by_piece(folder):
    sampler = sampler_of(folder)
    params = {"max_tokens": 25, "seed": 4, "temperature": 1.2}
    whole = sampler.sample(rows(PROMPTS[:1]), params)[0].sequences[0]
    pieces = list(sampler.sample_stream(rows()[0], params))
    assert "".join(text for text, _ in pieces) == whole.decoded
    assert [reason for _, reason in pieces] == [None] * (len(pieces) - 1) + [whole.stop_reason]
    assert len(pieces) > 5


@pytest.mark.full
def test_a_stream_shows_nothing_of_its_stop_string(folder):
    sampler = sampler_of(folder)
    for seed in range(40):
        params = {"max_tokens": 25, "seed": seed, "temperature": 1.2}
        text = sampler.sample(rows(PROMPTS[:1]), params)[0].sequences[0].decoded
        if len(text) > 12 and "\ufffd" not in text and text.isprintable():
            break
    pieces = list(sampler.sample_stream(rows()[0], {**params, "stop": ["@@@", text[6:10]]}))
    assert "".join(piece for piece, _ in pieces) == text[: text.index(text[6:10])]
    assert pieces[-1][1] == "stop"


def test_a_stream_that_is_closed_stops_its_request(folder):
    sampler = sampler_of(folder)
    stream = sampler.sample_stream(rows()[0], {"max_tokens": 30, "temperature": 0, "stop": []})
    next(stream)
    assert len(sampler._service.engine.kv_manager.slots) == 1
    stream.close()
    assert not sampler._service.engine.kv_manager.slots


def test_a_stream_takes_one_input_and_one_sample(folder):
    sampler = sampler_of(folder)
    with pytest.raises(ArgumentError, match="num_samples must be 1, got 2"):
        sampler.sample_stream(rows()[0], {"num_samples": 2})
    with pytest.raises(ArgumentError, match="one input, got 2"):
        sampler.submit(rows(PROMPTS[:2]))
    with pytest.raises(ArgumentError, match="sample 2 of a request with 2 samples"):
        list(sampler.submit(rows()[0], {"max_tokens": 1}, num_samples=2).tokens(2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cache_bytes": 0}, "cache_bytes is 0"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes is -1"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
        ({"max_batch_size": True}, "max_batch_size is True"),
    ],
)
def test_limits_that_make_no_sense_are_refused(folder, arguments, text):
    with pytest.raises(ArgumentError, match=text):
        TorchSampler(folder, **arguments)


@pytest.mark.full
def test_random_arrivals_cancels_and_sizes_leave_every_request_as_it_is_alone(folder, adapters):
    target, _ = adapters
    alone = sampler_of(folder, max_batch_size=1, prefix_cache_bytes=0)
    sampler = sampler_of(folder, max_batch_size=5, prefill_tokens=9, cache_bytes=400 * 512, prefix_cache_bytes=60 * 512)
    for one in (alone, sampler):
        for name in ("small", "large"):
            one.add_adapter_to_sampler(name, target / name)
    draw = torch.Generator().manual_seed(3)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    asked, handles = [], []
    for number in range(40):
        prompt = [*pick(*PROMPTS)[: pick(1, 5, 17, 40)], pick(1, 2, 3)]
        params = {
            "max_tokens": pick(0, 1, 4, 15, 30), "temperature": pick(0, 1.0, 0.6), "top_k": pick(-1, 20),
            "top_p": pick(1.0, 0.8), "seed": number, "num_samples": pick(1, 1, 3, 7), "logprobs": pick(None, 2),
            "repetition_penalty": pick(1.0, 1.3), "prompt_logprobs": pick(None, None, 1), "stop": [],
        }  # fmt: skip
        asked.append((prompt, params, pick(None, "small", "large")))
        handles.append(sampler.submit(rows([prompt])[0], params, asked[-1][2]))
        if number % 3 == 0:
            for _ in range(pick(1, 2, 6)):
                sampler._service.engine.drive(_some_steps(handles))
        if number % 7 == 6:
            handles[pick(number, number - 3)].cancel()
    cancelled = 0
    for (prompt, params, name), handle in zip(asked, handles, strict=True):
        result, expected = handle.result(), alone.sample(rows([prompt]), params, name)[0]
        for ours, theirs in zip(result.sequences, expected.sequences, strict=True):
            if ours.stop_reason == "abort":
                cancelled += 1
                assert ours.tokens == theirs.tokens[: len(ours.tokens)]
            else:
                assert ours.tokens == theirs.tokens
                assert ours.stop_reason == theirs.stop_reason
                assert (ours.logprobs is None) == (theirs.logprobs is None)
    assert cancelled
    assert not sampler._service.engine.kv_manager.slots


def _some_steps(handles):
    seen = []

    def until():
        seen.append(1)
        return len(seen) > 3 or all(handle.done for handle in handles)

    return until

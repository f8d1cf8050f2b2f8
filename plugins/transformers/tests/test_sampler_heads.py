"""TorchSampler: prompts that begin alike, while one of them is being read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import (
    PROMPTS,
    adapters,  # noqa: F401 - a fixture
    assert_same_scores,
    folder,  # noqa: F401 - a fixture
    rows,
    sampler_of,
    tokens_of,
)
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import NonFiniteError
from twinkle.sampler import TorchSampler
from twinkle_transformers.loading import load_model
from twinkle_transformers.sampling.kv_cache import common

HEAD = PROMPTS[3] + PROMPTS[8]  # 73 tokens
ALIKE = [[*HEAD, n, n + 1] for n in range(5)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "stop": []}
BLOCK_BYTES = 16 * 512


def spy(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that grows by how many tokens each step reads of each sequence."""
    steps: list[list[int]] = []
    runner = sampler._service.runner
    read = runner.read

    def counted(pieces: Any, store: Any) -> Any:
        steps.append([len(piece.tokens) for piece in pieces])
        return read(pieces, store)

    monkeypatch.setattr(runner, "read", counted)
    return steps


def alone(folder: Path, prompts: list[list[int]], params: dict[str, Any] = GREEDY, **call: Any) -> Any:
    """Return the tokens of each prompt where nothing else is there and nothing is kept."""
    sampler = sampler_of(folder, prefix_cache_bytes=0)
    return [tokens_of(sampler.sample(rows([ids]), params, **call))[0] for ids in prompts]


def fail_once(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next step fail."""
    runner = sampler._service.runner
    read = runner.read

    def fails(pieces: Any, store: Any) -> Any:
        monkeypatch.setattr(runner, "read", read)
        raise RuntimeError("this once")

    monkeypatch.setattr(runner, "read", fails)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kept", [None, 0, 2 * BLOCK_BYTES], ids=["cache", "no cache", "a cache of two blocks"])
def test_a_head_is_read_once_to_its_last_token_whatever_is_kept(
    folder: Path, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, prefix_cache_bytes=kept)
    steps = spy(sampler, monkeypatch)
    found = sampler.sample(rows(ALIKE), GREEDY)
    assert steps == [[75], [1, 2, 2, 2, 2], [1] * 5, [1] * 4]
    assert [response.cached_tokens for response in found] == [0, 73, 73, 73, 73]
    assert tokens_of(found) == alone(folder, ALIKE)


@pytest.mark.full
def test_a_head_is_there_for_the_others_also_when_its_first_prompt_ends_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, prefix_cache_bytes=0)
    steps = spy(sampler, monkeypatch)
    params = {**GREEDY, "max_tokens": 1}
    assert tokens_of(sampler.sample(rows(ALIKE), params)) == alone(folder, ALIKE, params)
    assert steps == [[75], [2, 2, 2, 2]]
    steps.clear()
    scored = sampler.sample(rows(ALIKE), {"max_tokens": 0, "prompt_logprobs": 1, "prompt_logprobs_last": 12})
    assert steps == [[75], [13] * 4]  # the head ends before what is scored
    plain = sampler_of(folder, prefix_cache_bytes=0)
    for ids, response in zip(ALIKE, scored, strict=True):
        (whole,) = plain.sample(rows([ids]), {"max_tokens": 0, "prompt_logprobs": 1})
        assert response.prompt_logprobs[-12:] == pytest.approx(whole.prompt_logprobs[-12:], abs=1e-4)
    steps.clear()
    sampler.sample(rows(ALIKE), {"max_tokens": 0, "prompt_logprobs": 1})
    assert steps == [[75] * 5]


@pytest.mark.full
def test_samples_are_those_of_each_prompt_alone_for_a_seed(folder: Path) -> None:
    params = {"max_tokens": 6, "seed": 3, "stop": [], "num_samples": 3, "logprobs": 1}
    together = sampler_of(folder).sample(rows(ALIKE), params)
    one_by_one = sampler_of(folder, max_batch_size=1, prefix_cache_bytes=0).sample(rows(ALIKE), params)
    assert tokens_of(together) == tokens_of(one_by_one)
    for mine, other in zip(together, one_by_one, strict=True):
        for a, b in zip(mine.sequences, other.sequences, strict=True):
            assert [p[0][1] for p in a.logprobs] == pytest.approx([p[0][1] for p in b.logprobs], abs=1e-4)


def test_a_prompt_that_comes_while_another_is_read_begins_with_their_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, prefill_tokens=16)
    prompts = [HEAD, [*HEAD[:40], 1, 2, 3]]
    first = sampler.submit(rows(prompts)[0], GREEDY)
    sampler.step()
    steps = spy(sampler, monkeypatch)
    late = sampler.submit(rows(prompts)[1], GREEDY)
    while not late.done:
        sampler.step()
    assert steps[:5] == [[16], [16], [16], [9], [1, 3]]
    assert [tokens_of([handle.result()])[0] for handle in (first, late)] == alone(folder, prompts)


@pytest.mark.full
@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_those_that_wait_go_on_when_the_one_that_is_read_ends(
    folder: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, prefill_tokens=25)
    steps = spy(sampler, monkeypatch)
    handles = [sampler.submit(row, GREEDY) for row in rows(ALIKE)]
    sampler.step()
    if end == "cancelled":
        handles[0].cancel()
    else:
        fail_once(sampler, monkeypatch)
    assert [tokens_of([handle.result()])[0] for handle in handles[1:]] == alone(folder, ALIKE[1:])
    assert steps[:5] == [[25], [25], [25], [25], [1, 2, 2, 2]]
    if end == "failed":
        with pytest.raises(RuntimeError, match="this once"):
            handles[0].result()
    assert not sampler._service.engine.kv_manager.slots


@pytest.mark.sample(2)
@pytest.mark.parametrize("at_once", [25, 50, 200])
def test_a_prompt_with_broken_logits_breaks_no_other_that_begins_like_it(folder: Path, at_once: int) -> None:
    module, _ = load_model(folder)
    with torch.no_grad():
        module.model.embed_tokens.weight[200].fill_(torch.nan)
    sampler = TorchSampler(model=module, prefix_cache_bytes=0, prefill_tokens=at_once)
    head = [token for token in HEAD if token != 200]
    prompts = [[*head, 200, *range(50)], *([*head, n] for n in range(3))]
    handles = [sampler.submit(row, GREEDY) for row in rows(prompts)]
    with pytest.raises(NonFiniteError, match="row 0"):
        handles[0].result()
    plain = TorchSampler(model=module, prefix_cache_bytes=0)
    expected = [tokens_of(plain.sample(rows([ids]), GREEDY))[0] for ids in prompts[1:]]
    assert [tokens_of([handle.result()])[0] for handle in handles[1:]] == expected


@pytest.mark.full
def test_adapters_share_no_head_with_each_other(
    folder: Path, adapters: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(folder, prefix_cache_bytes=0)
    for name in ("small", "other"):
        sampler.add_adapter_to_sampler(name, adapters[0] / name)
    names = ["small", "other", None, "small", "other"]
    steps = spy(sampler, monkeypatch)
    found = tokens_of(sampler.sample(rows(ALIKE), GREEDY, names))
    assert steps[:2] == [[75, 75, 75], [1, 1, 1, 2, 2]]
    for ids, name, tokens in zip(ALIKE, names, found, strict=True):
        path = None if name is None else adapters[0] / name
        assert [tokens] == alone(folder, [ids], adapter_path=path)


def test_a_prompt_that_waits_for_a_head_keeps_its_turn(folder: Path) -> None:
    sampler = sampler_of(folder, max_batch_size=2)
    long = {**GREEDY, "max_tokens": 40}
    handles = [sampler.submit(row, long) for row in rows([*ALIKE[:2], [1, 2, 3]])]
    sampler.step()
    sampler.step()
    first, second, third = (handle._request.result.drafts[0].tokens for handle in handles)
    assert [len(first), len(second), len(third)] == [2, 1, 0]


def test_nobody_else_waits_while_a_head_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(folder, prefill_tokens=20, max_batch_size=6)
    steps = spy(sampler, monkeypatch)
    sampler.submit(rows([[1, 2, 3]])[0], GREEDY, num_samples=3)
    for row in rows([*ALIKE[:2], [4, 5, 6]]):
        sampler.submit(row, GREEDY)
    while sampler.step():
        pass
    # 3 samples run as soon as their prompt is read, although one waits; so does the last, which is short
    assert steps[:3] == [[3, 14, 3], [1, 1, 1, 1, 20], [1, 1, 1, 1, 20]]
    assert steps[3:6] == [[20], [1], [1, 2]]


@pytest.mark.full
def test_what_ran_while_weights_were_written_serves_no_later_prompt(folder: Path) -> None:
    module, _ = load_model(folder)
    sampler = TorchSampler(model=module)
    running = sampler.submit(rows([HEAD])[0], {**GREEDY, "max_tokens": 8})
    next(running.tokens())
    with torch.no_grad():
        module.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    plain = TorchSampler(model=module, prefix_cache_bytes=0)
    expected = [tokens_of(plain.sample(rows([ids]), GREEDY))[0] for ids in ALIKE[:2]]
    assert tokens_of(sampler.sample(rows(ALIKE[:1]), GREEDY)) == expected[:1]  # beside it
    sampler.reset_prefix_cache()
    running.result()
    assert tokens_of(sampler.sample(rows(ALIKE[1:2]), GREEDY)) == expected[1:]  # after it


@pytest.mark.full
def test_rows_that_begin_alike_are_bit_equal_alone_and_among_others_where_that_is_asked_for(folder: Path) -> None:
    prompts = [[*HEAD[:32], *[n] * 7] for n in range(12)]
    params = {"temperature": 0, "max_tokens": 6, "logprobs": 3, "stop": []}
    sampler = sampler_of(folder, batch_invariant=True)
    together = sampler.sample(rows(prompts), params)
    for ids, response in zip(prompts, together, strict=True):
        (other,) = sampler_of(folder, batch_invariant=True).sample(rows([ids]), params)
        assert_same_scores(sampler.model, ids, other.sequences[0], response.sequences[0])


def test_the_common_beginning_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        size, cut = (int(torch.randint(0, 600, (), generator=generator)) for _ in range(2))
        one = torch.randint(0, 2, (size,), generator=generator).tolist()
        other = [*one[:cut], *torch.randint(0, 2, (5,), generator=generator).tolist()]
        most = int(torch.randint(0, 700, (), generator=generator))
        expected = 0
        while expected < min(most, len(one), len(other)) and one[expected] == other[expected]:
            expected += 1
        assert common(one, other, most) == expected

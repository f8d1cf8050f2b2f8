"""What a request may want to know beside its tokens, against a plain forward: in steps of the engine, and whole."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import PROMPTS, folder, module, rows  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture
from torch import Tensor

from twinkle.data_format import SamplingParams
from twinkle.errors import DataError, Unsupported
from twinkle.sampler import TorchSampler
from twinkle_transformers.sampling.requests import PromptScores
from twinkle_transformers.sampling.runner import Runner

PROMPT = PROMPTS[1]
OPEN = {"stop": []}


@pytest.fixture(params=["in steps", "whole"])
def sampler(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sampler of each of the two ways."""
    if request.param == "whole":
        monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    made: Any = TorchSampler(folder, prefill_tokens=7)
    assert (made._service.engine is None) == (request.param == "whole")
    return made


@pytest.fixture(scope="module")
def table_of(module: Any) -> Callable[..., Tensor]:
    """Return a function that gives log-probabilities `[T, V]` behind each of some tokens, in float64."""

    def table(ids: list[int], temperature: float = 1.0) -> Tensor:
        with torch.no_grad():
            logits: Tensor = module(input_ids=torch.tensor([ids])).logits[0].double()
        return (logits / temperature).log_softmax(-1)

    return table


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("temperature", "scored_at"), [(0.7, None), (0.7, 1.0), (0.0, 1.0), (0.0, None), (1.0, 0.5)])
def test_the_prompt_is_scored_at_a_temperature_of_its_own(
    sampler: Any, table_of: Any, temperature: float, scored_at: float | None
) -> None:
    params = {
        "temperature": temperature,
        "max_tokens": 2,
        "prompt_logprobs": 3,
        "prompt_temperature": scored_at,
        **OPEN,
    }
    (response,) = sampler.sample(rows([PROMPT]), {**params, "logprobs": 1, "seed": 3})
    table = table_of(PROMPT, scored_at or temperature or 1.0)
    assert response.prompt_logprobs[0] is None
    assert response.topk_prompt_logprobs[0] is None
    wanted = [table[at, token].item() for at, token in enumerate(PROMPT[1:])]
    assert response.prompt_logprobs[1:] == near(wanted)
    for at, best in enumerate(response.topk_prompt_logprobs[1:]):
        values, ids = table[at].topk(3)
        assert [token for token, _ in best] == ids.tolist()
        assert [score for _, score in best] == near(values.tolist())
    first = response.sequences[0].logprobs[0][0]
    assert first[1] == near(table_of(PROMPT, temperature or 1.0)[-1, first[0]].item())


@pytest.mark.sample(6)
@pytest.mark.parametrize("last", [0, 1, 5, len(PROMPT) - 1, len(PROMPT), 500])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_only_the_last_tokens_are_scored(sampler: Any, table_of: Any, last: int, max_tokens: int) -> None:
    params = {"max_tokens": max_tokens, "prompt_logprobs": 2, "prompt_logprobs_last": last, "seed": 1}
    (response,) = sampler.sample(rows([PROMPT]), params)
    begin = max(1, len(PROMPT) - last)
    table = table_of(PROMPT)
    assert response.prompt_logprobs[:begin] == [None] * begin == response.topk_prompt_logprobs[:begin]
    wanted = [table[at - 1, PROMPT[at]].item() for at in range(begin, len(PROMPT))]
    assert response.prompt_logprobs[begin:] == near(wanted)
    assert all(len(best) == 2 for best in response.topk_prompt_logprobs[begin:])


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, len(PROMPT) - 1, len(PROMPT)])
def test_targets_are_scored_where_they_are_asked_for(sampler: Any, table_of: Any, count: int) -> None:
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(-1, 200, (count, 4), generator=draw)
    targets[:, 2] = -1
    if count > 1:
        targets[0] = -1
    params = {"max_tokens": 1, "prompt_targets": targets.tolist(), "prompt_temperature": 1.0, "temperature": 0.4}
    (response,) = sampler.sample(rows([PROMPT]), params)
    table = table_of(PROMPT)
    assert response.prompt_logprobs is None
    assert len(response.prompt_target_logprobs) == count
    for at, (asked, found) in enumerate(zip(targets.tolist(), response.prompt_target_logprobs, strict=True)):
        for token, score in zip(asked, found, strict=True):
            assert (score is None) if token == -1 else score == near(table[at, token].item())


def test_targets_that_ask_nothing_are_answered_with_nothing(sampler: Any) -> None:
    for targets, wanted in (([[-1, -1]] * 3, [[None, None]] * 3), ([], []), ([[]] * 2, [[]] * 2)):
        (response,) = sampler.sample(rows([PROMPT]), {"max_tokens": 1, "prompt_targets": targets})
        assert response.prompt_target_logprobs == wanted


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([[1]] * (len(PROMPT) + 1), f"the shape \\[{len(PROMPT) + 1}, 1\\]"),
        ([[1], [2, 3]], "must be a table"),
        ([[1.5]], "float"),
        ([[-2]], "hold -2, outside"),
        ([[10**6]], "hold 1000000, outside"),
        ([3, 4], r"the shape \[2\]"),
    ],
)
def test_targets_that_fit_no_prompt_are_refused(folder: Path, targets: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"row 0: .*{said}"):
        TorchSampler(folder).sample(rows([PROMPT]), {"max_tokens": 1, "prompt_targets": targets})


def test_draws_at_the_prompts_places_follow_the_distribution(sampler: Any, table_of: Any) -> None:
    params = {"max_tokens": 1, "temperature": 0.8, "prompt_draws": 4000, "seed": 11, "top_k": 1}
    prompt = PROMPT[:5]
    (response,) = sampler.sample(rows([prompt]), params)
    assert [len(drawn) for drawn in response.prompt_draws] == [4000] * 4
    for at, drawn in enumerate(response.prompt_draws):
        table = table_of(prompt, 0.8)[at]
        assert all(score == near(table[token].item()) for token, score in drawn[:50])
        counts = Counter(token for token, _ in drawn)
        common = [token for token in range(len(table)) if float(table[token].exp()) * 4000 >= 20]
        expected = torch.tensor([float(table[token].exp()) * 4000 for token in common])
        found = torch.tensor([float(counts[token]) for token in common])
        assert float(((found - expected) ** 2 / expected).sum()) < 2.2 * len(common) + 10
    (greedy,) = sampler.sample(rows([prompt]), {**params, "temperature": 0, "prompt_draws": 2})
    best = table_of(prompt).argmax(-1).tolist()
    assert [[token for token, _ in drawn] for drawn in greedy.prompt_draws] == [[b, b] for b in best[:-1]]


def test_draws_depend_on_the_seed_and_the_place_alone(sampler: Any) -> None:
    params = {"max_tokens": 1, "prompt_draws": 3, "seed": 5}
    alone = sampler.submit(rows([PROMPT])[0], params).result().prompt_draws
    others = [sampler.submit(row, {"max_tokens": 9, "seed": 2}) for row in rows(PROMPTS[3:5])]
    beside = sampler.submit(rows([PROMPT])[0], params).result().prompt_draws
    assert [[token for token, _ in drawn] for drawn in beside] == [[token for token, _ in drawn] for drawn in alone]
    other = sampler.submit(rows([PROMPT])[0], {**params, "seed": 6}).result().prompt_draws
    assert [[token for token, _ in drawn] for drawn in other] != [[token for token, _ in drawn] for drawn in alone]
    assert all(handle.result().sequences for handle in others)


def test_alternatives_of_sampled_tokens_are_the_most_probable_ones(sampler: Any, table_of: Any) -> None:
    params = {"max_tokens": 8, "temperature": 1.7, "seed": 4, "topk_logprobs": 3, "logprobs": 1, "top_k": 20, **OPEN}
    (response,) = sampler.sample(rows([PROMPT]), params, num_samples=3)
    apart = 0
    for sequence in response.sequences:
        table = table_of(PROMPT + sequence.tokens, 1.7)[len(PROMPT) - 1 :]
        assert len(sequence.topk_logprobs) == len(sequence.tokens) == 8
        for at, (token, own, best) in enumerate(
            zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True)
        ):
            values, ids = table[at].topk(3)
            assert [pair[0] for pair in best] == ids.tolist()
            assert [pair[1] for pair in best] == near(values.tolist())
            assert own == [(token, near(table[at, token].item()))]
            apart += token not in ids.tolist()
    assert apart
    assert sampler.sample(rows([PROMPT]), {"max_tokens": 1})[0].sequences[0].topk_logprobs is None


def test_an_empty_list_of_stops_runs_through_the_end_token(sampler: Any) -> None:
    greedy = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    (response,) = sampler.sample(rows([PROMPT]), {**greedy, "stop": []})
    tokens = response.sequences[0].tokens
    end = tokens[4]
    sampler.model.generation_config.eos_token_id = end
    through, ended, beside = (
        sampler.sample(rows([PROMPT]), {**greedy, "stop": stop})[0].sequences[0] for stop in ([], None, [10**5])
    )
    assert (through.tokens, through.stop_reason, len(through.logprobs)) == (tokens, "length", 12)
    first = tokens.index(end)
    for sequence in (ended, beside):
        assert (sequence.tokens, sequence.stop_reason) == (tokens[: first + 1], "stop")
        assert len(sequence.logprobs) == first + 1


def test_a_stop_string_is_among_the_tokens(sampler: Any) -> None:
    greedy = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    tokens = sampler.sample(rows([PROMPT]), {**greedy, "stop": []})[0].sequences[0].tokens
    text = sampler.template.tokenizer.decode(tokens[:4], skip_special_tokens=False)
    found = sampler.sample(rows([PROMPT]), {**greedy, "stop": [text]})[0].sequences[0]
    assert (found.stop_reason, found.tokens, len(found.logprobs)) == ("stop", tokens[:4], 4)


def test_a_list_of_seeds_draws_each_sample_as_a_request_of_its_own(sampler: Any) -> None:
    params = {"max_tokens": 10, "temperature": 1.3, **OPEN}
    row = rows([PROMPT])[0]
    together = sampler.submit(row, {**params, "seed": [7, 8, 9], "num_samples": 3}).result().sequences
    alone = [sampler.submit(row, {**params, "seed": seed}).result().sequences[0] for seed in (7, 8, 9)]
    assert [s.tokens for s in together] == [s.tokens for s in alone]
    assert len({tuple(s.tokens) for s in together}) == 3


def test_steps_are_taken_one_at_a_time_until_nothing_is_left(sampler: Any) -> None:
    assert sampler.step() is False
    params = {"max_tokens": 6, "temperature": 0, **OPEN}
    wanted = [response.sequences[0].tokens for response in sampler.sample(rows(PROMPTS[:3]), params)]
    handles = [sampler.submit(row, params) for row in rows(PROMPTS[:3])]
    assert not any(handle.done for handle in handles)
    steps = 0
    while sampler.step():
        steps += 1
        assert steps < 100
    assert all(handle.done for handle in handles)
    assert [handle.result().sequences[0].tokens for handle in handles] == wanted
    assert sampler.step() is False


def test_the_tokens_that_were_known_are_counted_and_scores_keep_them_out(folder: Path, table_of: Any) -> None:
    sampler: Any = TorchSampler(folder)
    row, size = rows([PROMPTS[3]])[0], len(PROMPTS[3])
    plain: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    assert sampler.submit(row, plain).result().cached_tokens == 0
    assert sampler.submit(row, plain).result().cached_tokens == 32
    assert sampler.submit(row, {**plain, "prompt_logprobs": 1}).result().cached_tokens == 0
    last = sampler.submit(row, {**plain, "prompt_logprobs": 1, "prompt_logprobs_last": 20}).result()
    assert last.cached_tokens == 16
    table = table_of(PROMPTS[3])
    assert last.prompt_logprobs[-20:] == near([table[at - 1, PROMPTS[3][at]].item() for at in range(size - 20, size)])
    targets = [[-1]] * 33 + [[5]]
    late = sampler.submit(row, {**plain, "prompt_targets": targets}).result()
    assert (late.cached_tokens, late.prompt_target_logprobs[33]) == (32, [near(table[33, 5].item())])


@pytest.mark.parametrize(
    "values",
    [
        {"seed": [1, 2]},
        {"prompt_logprobs_last": 3},
        {"prompt_logprobs": 1, "prompt_logprobs_last": -1},
        {"topk_logprobs": -1},
        {"prompt_draws": -1},
        {"prompt_temperature": -0.1},
    ],
)
def test_values_outside_their_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{list(values)[-1]} ="):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values", [{"topk_logprobs": 2}, {"prompt_draws": 1}, {"prompt_targets": [[1]]}, {"seed": [4]}], ids=str
)
def test_what_vllm_has_not_is_refused_before_it_is_imported(values: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=next(iter(values))):
        SamplingParams(**values).to_vllm()


def test_generate_never_stops_either(folder: Path, module: Any) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    tokens = TorchSampler(folder).sample(rows([PROMPT]), {**greedy, "stop": []})[0].sequences[0].tokens
    inputs = torch.tensor([PROMPT])
    before = module.generation_config.eos_token_id
    module.generation_config.eos_token_id = tokens[4]
    try:
        made = module.generate(
            inputs, attention_mask=torch.ones_like(inputs), pad_token_id=256,
            **SamplingParams.from_dict({**greedy, "stop": []}).to_transformers(),
        )  # fmt: skip
    finally:
        module.generation_config.eos_token_id = before
    assert made[0, len(PROMPT) :].tolist() == tokens


@pytest.mark.full
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_scores_are_the_same_in_whatever_pieces_the_rows_come_even_twice(data: st.DataObject) -> None:
    size, vocabulary = data.draw(st.integers(1, 9)), 11
    draw = torch.Generator().manual_seed(size)
    ids = torch.randint(0, vocabulary, (size,), generator=draw).tolist()
    logits = torch.randn(size, vocabulary, generator=draw)
    params = SamplingParams(
        prompt_logprobs=data.draw(st.sampled_from([None, 2])),
        prompt_draws=data.draw(st.integers(0, 2)),
        prompt_targets=data.draw(
            st.none() | st.lists(st.lists(st.integers(-1, 10), min_size=2, max_size=2), max_size=size)
        ),
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        prompt_temperature=data.draw(st.sampled_from([None, 1.0])),
    )
    if params.prompt_logprobs:
        params.prompt_logprobs_last = data.draw(st.none() | st.integers(0, size + 1))
    alone = data.draw(st.booleans())
    whole, pieces = (PromptScores.of(ids, params, 0, vocabulary, alone=alone) for _ in range(2))
    whole.write(0, logits, 3, 0)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=4))), size]
    for start, stop in itertools.pairwise(cuts):
        for _ in range(data.draw(st.integers(1, 2))):
            pieces.write(start, logits[start:stop], 3, 0)
    for name in ("logprobs", "topk", "targets", "draws"):
        assert getattr(pieces, name) == getattr(whole, name), name

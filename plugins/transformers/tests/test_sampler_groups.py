"""What reinforcement learning asks of a sampler: three kinds of log-probabilities, and groups that share prompts."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import FACTOR, units
from samplers import PROMPTS, folder, module, rows, tokens_of  # noqa: F401 - fixtures
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.data_format import SamplingParams
from twinkle.errors import Unsupported
from twinkle.sampler import TorchSampler
from twinkle_torch.numerics import RoundingNoise
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sampling.sampling_ops import draw, drawn_log_probs

DRAWN = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.8, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.6},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


def distribution(logits: list[float], seen: set[int], drawn: dict[str, Any]) -> dict[int, float]:
    """Return what a token is drawn from, as the papers say it, one number at a time."""
    penalty = drawn.get("repetition_penalty", 1.0)
    scores = {t: (x / penalty if x > 0 else x * penalty) if t in seen else x for t, x in enumerate(logits)}
    best = sorted(scores, key=lambda t: -scores[t])
    if drawn["temperature"] == 0:
        return {best[0]: 1.0}
    kept = best[: drawn.get("top_k", len(best))]
    weights = {t: math.exp((scores[t] - scores[best[0]]) / drawn["temperature"]) for t in kept}
    total, before = sum(weights.values()), 0.0
    nucleus: dict[int, float] = {}
    for token in kept:
        if before < drawn.get("top_p", 1.0):
            nucleus[token] = weights[token]
        before += weights[token] / total
    return {token: weight / sum(nucleus.values()) for token, weight in nucleus.items()}


def rounding_of(module: Any, exact: Any, tokens: list[int], drawn: dict[str, Any]) -> float:
    """Return how far float32 moves log-probabilities, measured against a copy of the model in float64."""
    with torch.no_grad():
        ids = torch.tensor([tokens])
        near, far = (each(input_ids=ids).logits[0].double() for each in (module, exact))
        with RoundingNoise(0, units=units()):
            moved = module(input_ids=ids).logits[0].double()
    cold = max(1.0, 1.0 / (drawn["temperature"] or 1.0)) * drawn.get("repetition_penalty", 1.0)
    return cold * max(float((one.log_softmax(-1) - far.log_softmax(-1)).abs().max()) for one in (near, moved))


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["in steps", "whole"])
@pytest.mark.parametrize("drawn", DRAWN, ids=str)
def test_log_probabilities_of_three_distributions(
    folder: Path, module: Any, drawn: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "whole":
        monkeypatch.setattr(Runner, "_refusal", lambda self: "the test says so")
    prompt = PROMPTS[1]
    params = {**drawn, "max_tokens": 6, "seed": 2, "stop": [], "num_samples": 2, "logprobs": 1}
    sampler = TorchSampler(folder)
    (response,) = sampler.sample(rows([prompt]), {**params, "sampled_logprobs": True, "raw_logprobs": True})
    (plain,) = sampler.sample(rows([prompt]), params)
    exact = copy.deepcopy(module).double()
    for sequence, other in zip(response.sequences, plain.sequences, strict=True):
        assert sequence.tokens == other.tokens
        limit = FACTOR * rounding_of(module, exact, prompt + sequence.tokens, drawn)
        for mine, theirs in zip(sequence.logprobs, other.logprobs, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs]
            gaps = [abs(one - two) for (_, one), (_, two) in zip(mine, theirs, strict=True)]
            assert max(gaps) <= limit, "the second request reads the prompt out of the cache"
        assert other.sampled_logprobs is other.raw_logprobs is None
        assert sequence.sampled_logprobs
        assert sequence.raw_logprobs
        assert sequence.logprobs
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([prompt + sequence.tokens])).logits[0].double()
        for place, token in enumerate(sequence.tokens):
            table = logits[len(prompt) - 1 + place]
            chances = distribution(table.tolist(), {*prompt, *sequence.tokens[:place]}, drawn)
            assert sequence.sampled_logprobs[place] == pytest.approx(math.log(chances[token]), abs=1e-4)
            assert sequence.raw_logprobs[place] == pytest.approx(float(table.log_softmax(-1)[token]), abs=1e-4)
            warm = (table / (drawn["temperature"] or 1.0)).log_softmax(-1)
            assert sequence.logprobs[place][0][1] == pytest.approx(float(warm[token]), abs=1e-4)


def test_what_is_drawn_is_as_probable_as_it_says() -> None:
    """Each token of a filtered distribution: the share of evenly spread noise that draws it is its probability."""
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    how = {"temperature": 0.8, "top_k": 9, "top_p": 0.85}
    count = 20_000
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(logits.expand(count, -1), noise, **how)  # type: ignore[arg-type]
    for token, times in zip(*tokens.unique(return_counts=True), strict=True):
        (said,) = drawn_log_probs(logits, token[None], **how)  # type: ignore[arg-type]
        assert math.exp(said) == pytest.approx(float(times) / count, abs=2 / count)


@pytest.mark.parametrize("name", ["sampled_logprobs", "raw_logprobs"])
def test_they_are_asked_for_by_yes_or_no_and_not_of_vllm(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} = 3; it must be True or False"):
        SamplingParams(**{name: 3})
    with pytest.raises(Unsupported, match=name):
        SamplingParams(**{name: True}).to_vllm()


def read_by(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of tokens that each step reads of prompts."""
    counted: list[int] = []
    runner = sampler._service.engine.runner
    read = runner.read

    def counting(pieces: Any, store: Any) -> Any:
        counted.extend(len(piece.tokens) for piece in pieces if len(piece.tokens) > 1)
        return read(pieces, store)

    monkeypatch.setattr(runner, "read", counting)
    return counted


def test_a_group_reads_its_prompt_once_however_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, count = [PROMPTS[3], PROMPTS[1]], 4  # 40 and 21 tokens
    params = {"max_tokens": 5, "temperature": 0, "stop": [], "logprobs": 1}
    together, expanded = TorchSampler(folder), TorchSampler(folder)
    once, each = read_by(together, monkeypatch), read_by(expanded, monkeypatch)
    wide = tokens_of(together.sample(rows(batch), params, num_samples=count))
    assert sum(once) == 40 + 21
    found = expanded.sample(rows([prompt for prompt in batch for _ in range(count)]), params)
    assert each == [40, 21]  # and the last token of each of the others, which is read alone
    assert [response.cached_tokens for response in found] == [0, 39, 39, 39, 0, 20, 20, 20]
    alone = [tokens[0] for tokens in tokens_of(found)]
    assert [alone[:count], alone[count:]] == wide

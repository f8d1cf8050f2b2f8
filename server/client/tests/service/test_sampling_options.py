"""Every option of `SamplingParams` gives the same sequences and scores on a service as in this process."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError
from twinkle_client import TwinkleClient, vLLMSampler
from twinkle_client.errors import RequestRefused
from twinkle_client.types import SamplingOptions
from twinkle_transformers.sampler import TorchSampler as LocalSampler

PROMPT = {"input_ids": [5, 6, 7, 5, 6]}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "logprobs": 3},
    "min_p": {"min_p": 0.4, "temperature": 1.5},
    "repetition_penalty": {"repetition_penalty": 3.0, "temperature": 0.0},
    "presence_penalty": {"presence_penalty": 4.0, "temperature": 0.0},
    "frequency_penalty": {"frequency_penalty": 3.0, "temperature": 0.0},
    "logit_bias": {"logit_bias": {9: 30.0, 11: 29.5}},
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}},
    "json": {"structured_outputs": {"json": '{"type": "integer", "maximum": 99}'}, "max_tokens": 12},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}, "stop": []},
    "topk_logprobs": {"topk_logprobs": 4, "logprobs": 2},
    "sampled_logprobs": {"sampled_logprobs": True, "raw_logprobs": True, "top_k": 5, "temperature": 0.6},
    "stop": {"logit_bias": {97: 40.0, 98: 39.5}, "stop": ["a"]},
    "stop_ids": {"logit_bias": {9: 40.0, 11: 39.0}, "stop": [11]},
    "prompt_logprobs": {"prompt_logprobs": 3, "temperature": 0.5},
    "prompt_temperature": {"prompt_logprobs": 1, "temperature": 0.5, "prompt_temperature": 2.0},
    "prompt_logprobs_last": {"prompt_logprobs": 2, "prompt_logprobs_last": 2},
    "prompt_targets": {"prompt_targets": [[3, 4], [5, -1]], "temperature": 0.5},
    "prompt_draws": {"prompt_draws": 3, "max_tokens": 2},
    "max_new_tokens": {"max_new_tokens": 2},
    "scores": {"max_tokens": 0, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def local(base: Path) -> LocalSampler:
    sampler = LocalSampler(model_id=str(base))
    sampler.set_template("Template")
    return sampler


def remote(client: TwinkleClient) -> vLLMSampler:
    sampler = vLLMSampler("tiny", client=client)
    sampler.set_template("Template")
    return sampler


def same(found: Any, expected: Any, where: str) -> None:
    """Demand that results are equal: numbers to the accuracy of the wire, everything else exactly."""
    if isinstance(expected, float) and found is not None:
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=where)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{where}[{place}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_the_same_effect_as_in_a_local_sampler(
    client: TwinkleClient, local: LocalSampler, name: str
) -> None:
    one = name in ("prompt_draws", "scores")
    given = {"max_tokens": 6, "num_samples": 1 if one else 2, "seed": [3] if one else [3, 4], **OPTIONS[name]}
    if "max_new_tokens" in given:
        del given["max_tokens"]
    [answer], [expected] = remote(client).sample([PROMPT], given), local.sample([PROMPT], given)
    assert len(answer.sequences) == (0 if given.get("max_tokens") == 0 else given["num_samples"])
    for field in (
        "prompt_token_ids",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "prompt_target_logprobs",
        "prompt_draws",
    ):
        same(getattr(answer, field), getattr(expected, field), field)
    for place, sequence in enumerate(answer.sequences):
        for field in (
            "tokens", "stop_reason", "decoded", "logprobs", "topk_logprobs", "sampled_logprobs", "raw_logprobs",
        ):  # fmt: skip
            same(getattr(sequence, field), getattr(expected.sequences[place], field), f"{field} of {place}")


def test_options_change_what_is_sampled(client: TwinkleClient) -> None:
    """Otherwise the comparison above would hold for options without any effect."""
    sampler, given = remote(client), {"max_tokens": 6, "seed": 3, "temperature": 0.0, "stop": []}
    [plain] = sampler.sample([PROMPT], given)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "regex"):
        [changed] = sampler.sample([PROMPT], {**given, **OPTIONS[name]})
        assert changed.sequences[0].tokens != plain.sequences[0].tokens, name
    assert changed.sequences[0].decoded.isdecimal()


def test_a_stream_takes_the_same_options(client: TwinkleClient) -> None:
    sampler = remote(client)
    given = {"max_tokens": 12, "seed": [3, 4], "num_samples": 2, "topk_logprobs": 3, "min_p": 0.1, "stop": ["e", "1"]}
    [whole] = sampler.sample([PROMPT], given)
    deltas = list(sampler.sample_stream([PROMPT], given))
    for place, sequence in enumerate(whole.sequences):
        own = [delta for delta in deltas if delta.sample == place]
        assert [token for delta in own for token in delta.tokens] == sequence.tokens
        assert "".join(delta.text for delta in own) == sequence.decoded
        same([top for delta in own for top in delta.topk_logprobs or ()], sequence.topk_logprobs, "topk_logprobs")
    for name in ("sampled_logprobs", "raw_logprobs"):
        with pytest.raises(RequestRefused, match="use sample"):
            next(sampler.sample_stream([PROMPT], {name: True}))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"structured_outputs": {"regex": "("}}, "the regular expression cannot be used"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"seed": [1, 2]}, "one for each of num_samples = 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"prompt_targets": [[1], [2, 3]]}, "same length"),
        ({"prompt_logprobs_last": 2}, "prompt_logprobs"),
    ],
)
def test_an_invalid_option_is_refused(client: TwinkleClient, given: dict[str, Any], text: str) -> None:
    with pytest.raises((RequestRefused, ArgumentError), match=text):
        remote(client).sample([PROMPT], {"max_tokens": 2, **given})


def test_no_option_of_a_local_sampler_is_missing() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(SamplingOptions.model_fields)
    defaults = asdict(SamplingParams())
    assert {name: field.default for name, field in SamplingOptions.model_fields.items()} == defaults


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[]], r"must be a list of at least one token, got the shape \[1, 0\]"),
        ([], r"at least one token, got the shape \[0\]"),
        ([1.5], "must contain integers, got float"),
        ([1, [2]], "must be a list of numbers"),
        ([2**40], "must contain tokens between 0 and"),
        ("12", "must be a list of numbers"),
    ],
)
def test_tokens_that_are_none_are_refused(client: TwinkleClient, tokens: Any, words: str) -> None:
    sampler = vLLMSampler("tiny", client=client)
    sampler.sample(PROMPT, {"max_tokens": 1})
    session = sampler._samplers[None][1]
    for call in ("sample", "stream"):
        body = {
            "inputs": [{"input_ids": tokens}],
            "options": {"max_tokens": 1},
            **({"seq_id": 9} if call == "sample" else {}),
        }
        with pytest.raises(RequestRefused, match=f"input 0: input_ids.*{words}"):
            client.run(client.connection.request("POST", f"/samplers/{session}/{call}", body))

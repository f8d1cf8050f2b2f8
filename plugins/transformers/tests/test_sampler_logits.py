"""Bias, penalties, min-p and grammars: the numbers are those of transformers, or of the published formula."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, Unsupported
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.sampling.logit_processing import processed
from twinkle_transformers.sampling.requests import SequenceState, StopRule
from twinkle_transformers.sampling.sampling_ops import drawn_log_probs, sorted_distribution

PROMPT, TOKENS, SIZE = [3, 4, 4], [5, 5, 7], 12
ROW = {"input_ids": [1, 2, 3, 4]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> TorchSampler:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return TorchSampler(str(tiny_model(folder, num_hidden_layers=1, initializer_range=0.3)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TorchSampler:
    """A sampler whose model is decoded call by call."""
    folder = tmp_path_factory.mktemp("models") / "gemma"
    made = TorchSampler(str(tiny_model(folder, "gemma3", num_hidden_layers=1, initializer_range=0.3)))
    made._service._build = lambda model: None  # type: ignore[method-assign, return-value]
    return made


def state(tokens: list[int]) -> SequenceState:
    return SequenceState(0, 0, 99, StopRule().watch(), PROMPT, tokens=list(tokens))


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_penalties_are_the_published_formula(seed: int) -> None:
    logits = logits_of(seed)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.3)
    expected = [
        float(value) - 0.3 * TOKENS.count(token) - 0.7 * (TOKENS.count(token) > 0)
        for token, value in enumerate(logits[0])
    ]
    found = processed(logits, [(params, PROMPT, state(TOKENS))])
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert processed(logits, [(params, PROMPT, state([]))])[0].tolist() == logits[0].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_bias_then_repetition_are_those_of_transformers(seed: int) -> None:
    logits = logits_of(seed)
    params = SamplingParams(repetition_penalty=1.7, logit_bias={4: 1.5, 9: -2.0})
    ids = torch.tensor([PROMPT + TOKENS])
    biased = SequenceBiasLogitsProcessor([[[4], 1.5], [[9], -2.0]])(ids, logits.clone())
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, biased)
    torch.testing.assert_close(processed(logits, [(params, PROMPT, state(TOKENS))]), expected)


def test_rows_without_changes_keep_their_logits_bit_for_bit() -> None:
    logits = logits_of(1, rows=2)
    plain, biased = SamplingParams(), SamplingParams(logit_bias={0: 1.0})
    assert processed(logits, [(plain, PROMPT, state(TOKENS))] * 2) is logits
    found = processed(logits, [(plain, PROMPT, state(TOKENS)), (biased, PROMPT, state(TOKENS))])
    assert torch.equal(found[0], logits[0])
    assert found[1, 0] == logits[1, 0] + 1.0


@given(seed=st.integers(0, 99), top_k=st.sampled_from([-1, 5]), top_p=st.sampled_from([1.0, 0.8]),
       min_p=st.sampled_from([0.05, 0.2, 1.0]))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_min_p_keeps_what_transformers_keeps(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits, ids = logits_of(seed), torch.tensor([[0]])
    expected = logits / 1.3
    for warper in ([TopKLogitsWarper(top_k)] if top_k > 0 else []) + [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]:
        expected = warper(ids, expected)
    kept = set(expected[0].isfinite().nonzero().flatten().tolist())
    probs, order = sorted_distribution(logits, 1.3, top_k, top_p, min_p)
    assert set(order[probs > 0].tolist()) == kept
    token = torch.tensor([int(expected[0].argmax())])
    (found,) = drawn_log_probs(logits, token, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    assert found == pytest.approx(float(expected[0].log_softmax(-1)[token]), abs=1e-5)


@pytest.mark.parametrize("which", ["sampler", "whole"])
def test_both_loops_follow_the_grammar_and_end_where_the_text_is_complete(
    which: str, request: pytest.FixtureRequest
) -> None:
    one: TorchSampler = request.getfixturevalue(which)
    for stop in (None, []):
        params = SamplingParams(
            max_tokens=80, num_samples=3, seed=5, stop=stop, temperature=1.5, structured_outputs={"json": SCHEMA}
        )
        (response,) = one.sample(ROW, params)
        for sequence in response.sequences:
            assert sequence.stop_reason == "stop"
            assert json.loads(sequence.decoded or "")["a"] in ("x", "yz")


@pytest.mark.parametrize(
    ("structure", "allowed"),
    [({"choice": ["red", "green"]}, {"red", "green"}), ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
     ({"grammar": 'start: "x" "y"?'}, {"x", "xy"})],
)  # fmt: skip
def test_other_structures(sampler: TorchSampler, structure: dict[str, Any], allowed: set[str]) -> None:
    params = SamplingParams(max_tokens=20, num_samples=6, seed=1, temperature=2.0, structured_outputs=structure)
    (response,) = sampler.sample(ROW, params)
    assert {sequence.decoded for sequence in response.sequences} <= allowed


def test_a_grammar_does_not_change_its_neighbours(sampler: TorchSampler) -> None:
    plain = SamplingParams(max_tokens=12, seed=3, stop=[])
    (alone,) = sampler.sample(ROW, plain)
    constrained = replace(plain, structured_outputs={"json_object": True}, stop=None)
    handles = [sampler.submit(ROW, params) for params in (constrained, plain)]
    assert handles[1].result().sequences[0].tokens == alone.sequences[0].tokens
    assert handles[0].result().sequences[0].tokens != alone.sequences[0].tokens


def test_a_stop_string_ends_a_constrained_text_early(sampler: TorchSampler) -> None:
    params = SamplingParams(max_tokens=40, seed=1, stop='"a"', structured_outputs={"json": SCHEMA}, temperature=1.5)
    (sequence,) = sampler.sample(ROW, params)[0].sequences
    assert sequence.stop_reason == "stop"
    assert (sequence.decoded or "").strip() == "{"


@pytest.mark.parametrize("structure", [{"json": {"type": "nothing"}}, {"regex": "("}, {"grammar": "no grammar"}])
def test_structures_that_cannot_be_used_are_refused(sampler: TorchSampler, structure: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="structured_outputs"):
        sampler.submit(ROW, SamplingParams(max_tokens=1, structured_outputs=structure))


@pytest.mark.parametrize(
    "wrong",
    [{"min_p": -0.1}, {"min_p": 1.5}, {"presence_penalty": float("nan")}, {"logit_bias": {-1: 1.0}},
     {"logit_bias": {1: float("inf")}}, {"structured_outputs": {}}, {"structured_outputs": {"json": {}, "regex": "a"}},
     {"structured_outputs": {"choice": []}}, {"structured_outputs": {"json_object": False}}],
)  # fmt: skip
def test_values_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_other_libraries_get_them_or_refuse_them() -> None:
    given_ = SamplingParams(min_p=0.1, logit_bias={3: 1.0}).to_transformers()
    assert (given_["min_p"], given_["sequence_bias"]) == (0.1, [[[3], 1.0]])
    with pytest.raises(Unsupported, match="presence_penalty"):
        SamplingParams(presence_penalty=1.0).to_transformers()
    assert SamplingParams.from_dict({"logit_bias": {"3": 1}}).logit_bias == {3: 1.0}

"""Lines 70 to 80, 82 to 88, 90 and 91: sampling."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_sdk as sdk
from server_raw import Raw, RawSampler, logprobs_of, row, tokens_of
from server_reference import Reference
from serving import Served

PROMPT = [72, 101, 108, 108, 111]
EOS = 258


def refused(raw: Raw, sampler: RawSampler, word: str, prompt: list[int] = PROMPT, **fields: Any) -> None:
    """Demand that a request's future fails in words as the user's fault."""
    assert word in raw.refusal("/asample", sampler.body(prompt, **fields))


def test_line_70_a_sampling_session_is_there_at_once_and_an_unknown_path_is_refused(raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    assert raw.sampler(session, 1, model_path=model.save_sampler("a")).id
    body = {"session_id": session, "sampling_session_seq_id": 2}
    again = [raw.post("/create_sampling_session", {**body, "base_model": raw.base_model()}) for _ in range(2)]
    assert again[0] == again[1]
    unknown = [f"tinker://{model.id}/sampler_weights/b", "tinker://x/sampler_weights/a"]
    for path, status in [*((path, 404) for path in unknown), ("tinker://x", 400), ("/etc", 400)]:
        answer = raw.send("/create_sampling_session", {**body, "sampling_session_seq_id": 3, "model_path": path})
        assert answer.status_code == status, path
        assert path in answer.json()["detail"]
    answer = raw.send("/create_sampling_session", {**body, "sampling_session_seq_id": 4, "base_model": "no/such"})
    assert answer.status_code == 400
    assert "no/such" in answer.json()["detail"]


def test_lines_71_72_76_samples_are_counted_named_and_whole(raw: Raw) -> None:
    sampler = raw.sampler()
    promise = sampler.submit(PROMPT, 3, params={"max_tokens": 6, "stop": []})
    assert len(set(promise["sample_sequence_ids"])) == 3
    answer = raw.result(promise["request_id"], "sample")
    assert len(answer.sequences) == 3
    for sequence in answer.sequences:
        assert len(tokens_of(sequence)) == 6
        assert len(logprobs_of(sequence)) == 6
        assert np.isfinite(logprobs_of(sequence)).all()
        assert sequence.stop_reason == 1
    one = raw.result(sampler.submit(PROMPT, params={"max_tokens": 1})["request_id"], "sample").sequences[0]
    assert len(tokens_of(one)) == len(logprobs_of(one)) == 1


def test_line_73_a_stop_token_ends_the_sequence_and_is_its_last(raw: Raw) -> None:
    sampler = raw.sampler()
    free = sampler.greedy(PROMPT, 12)
    stop = next(token for at, token in enumerate(free) if at > 0 and token not in free[:at])
    answer = sampler.sample(PROMPT, params={"temperature": 0.0, "max_tokens": 12, "stop": [stop]})
    sequence = answer.sequences[0]
    assert tokens_of(sequence) == free[: free.index(stop) + 1]
    assert len(logprobs_of(sequence)) == len(tokens_of(sequence))
    assert sequence.stop_reason == 0


@pytest.mark.full
@pytest.mark.parametrize("shape", ["text", "list"])
def test_line_74_a_stop_string_ends_the_sequence_and_is_in_it_once(raw: Raw, tiny: Path, shape: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sampler = raw.sampler()
    for seed in range(20):
        params = {"max_tokens": 24, "stop": [], "seed": seed, "temperature": 1.0}
        free = tokens_of(sampler.sample(PROMPT, params=params).sequences[0])
        letters = [(at, tokenizer.decode(free[: at + 1])) for at in range(len(free))]
        word = tokenizer.decode(free[4:7])
        if len(word) == 3 and word.isascii() and word.isprintable() and letters[-1][1].count(word) >= 1:
            break
    else:
        pytest.fail("no seed gave three letters in a row")
    stop: Any = word if shape == "text" else [word, "never-this-one"]
    sequence = sampler.sample(PROMPT, params={**params, "stop": stop}).sequences[0]
    text = tokenizer.decode(tokens_of(sequence))
    assert text.endswith(word)
    assert text.count(word) == 1
    assert sequence.stop_reason == 0
    assert tokens_of(sequence) == free[: len(tokens_of(sequence))]


@pytest.mark.full
def test_line_75_the_end_token_stops_unless_the_list_of_stops_is_empty(raw: Raw) -> None:
    model = raw.model()
    for _ in range(6):  # teach it to end at once
        model.forward_backward([row([*PROMPT, EOS, EOS, EOS])])
        model.step(learning_rate=3e-2)
    sampler = model.freeze(0)
    params = {"temperature": 0.0, "max_tokens": 5}
    ended = sampler.sample(PROMPT, params=params).sequences[0]
    assert tokens_of(ended)[-1] == EOS
    assert tokens_of(ended).count(EOS) == 1
    assert ended.stop_reason == 0
    going_on = sampler.sample(PROMPT, params={**params, "stop": []}).sequences[0]
    assert len(tokens_of(going_on)) == 5
    assert going_on.stop_reason == 1
    with_others = sampler.sample(PROMPT, params={**params, "stop": [1]}).sequences[0]
    assert tokens_of(with_others) == tokens_of(ended), "the end token still stops beside other stops"


def test_line_77_temperature_0_is_the_forward_passs_argmax(raw: Raw, tiny: Path) -> None:
    found = raw.sampler().greedy(PROMPT, 8)
    reference, tokens = Reference(tiny), list(PROMPT)
    for _ in range(8):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    assert found == tokens[len(PROMPT) :]


def test_line_78_a_seed_gives_the_same_tokens_and_its_samples_differ(raw: Raw) -> None:
    params = {"max_tokens": 12, "stop": [], "seed": 7}
    sampler, other = raw.sampler(), raw.sampler(raw.session(), 0)
    first = [tokens_of(sequence) for sequence in sampler.sample(PROMPT, 3, params=params).sequences]
    again = [tokens_of(sequence) for sequence in other.sample(PROMPT, 3, params=params).sequences]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3
    free = [tokens_of(sampler.sample(PROMPT, params={"max_tokens": 12, "stop": []}).sequences[0]) for _ in range(2)]
    assert free[0] != free[1], "without a seed every request draws anew"


def test_lines_79_80_logprobs_are_those_of_the_distribution_that_was_sampled(raw: Raw) -> None:
    model = raw.model()
    model.train(PROMPT * 3, steps=2)
    sampler = model.freeze(0)
    for temperature in (1.0, 0.5, 2.0):
        answer = sampler.sample(PROMPT, params={"max_tokens": 10, "stop": [], "seed": 3, "temperature": temperature})
        tokens = tokens_of(answer.sequences[0])
        found = logprobs_of(answer.sequences[0])
        expected = scaled(raw, model, tokens, temperature)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def scaled(raw: Raw, model: Any, tokens: list[int], temperature: float) -> Any:
    """Return log-probabilities of sampled tokens under a temperature, from forward passes over the whole vocabulary."""
    from server_raw import arrays, datum

    whole = [*PROMPT, *tokens]
    vocabulary = 264
    targets = np.tile(np.arange(vocabulary), (len(whole) - 1, 1))
    weights = np.zeros(targets.shape, np.float32)
    logps = arrays(model.forward([datum(whole[:-1], target_tokens=targets, weights=weights)]))[0].astype(np.float64)
    logits = logps[len(PROMPT) - 1 :] / temperature
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(tokens)), tokens]


@pytest.mark.full
def test_line_82_a_prompt_is_scored_as_the_forward_pass_does(raw: Raw, served: Served, tiny: Path) -> None:
    model = raw.model()
    model.train(PROMPT * 2, steps=2)
    scores = model.freeze(0).scores(PROMPT)
    assert len(scores) == len(PROMPT)
    assert np.isnan(scores[0])
    np.testing.assert_allclose(scores[1:], model.logprobs(PROMPT), atol=1e-4)
    with sdk.opened(served.url) as client:
        found = client.create_sampling_client(base_model=str(tiny)).result(60).compute_logprobs(sdk.prompt(PROMPT))
        values = found.result(60)
    assert values[0] is None
    np.testing.assert_allclose(values[1:], Reference(tiny).scores(PROMPT).numpy(), atol=1e-4)


def test_line_83_only_the_last_prompt_tokens_are_scored_if_that_was_asked(raw: Raw) -> None:
    sampler = raw.sampler()
    whole = sampler.scores(PROMPT)
    answer = sampler.sample(PROMPT, params={"max_tokens": 1}, prompt_logprobs=True, prompt_logprobs_last_n=2)
    found = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(found[:-2]).all()
    np.testing.assert_allclose(found[-2:], whole[-2:], atol=1e-5)


def test_line_84_to_ask_for_alternatives_of_the_prompt_is_to_ask_for_its_scores(raw: Raw) -> None:
    sampler = raw.sampler()
    answer = sampler.sample(PROMPT, params={"max_tokens": 1}, topk_prompt_logprobs=2)
    scores = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(scores[0])
    np.testing.assert_array_equal(scores, sampler.scores(PROMPT))


def test_line_84_alternatives_are_sorted_and_agree_with_the_scores(raw: Raw, tiny: Path) -> None:
    answer = raw.sampler().sample(
        PROMPT, params={"max_tokens": 4, "stop": [], "temperature": 0.0}, prompt_logprobs=True,
        topk_prompt_logprobs=3, topk_sample_logprobs=3,
    )  # fmt: skip
    logits = Reference(tiny).logits(PROMPT).log_softmax(-1)
    top = logits.topk(3)
    for found, length in (
        (answer.topk_prompt_logprobs, len(PROMPT)), (answer.sequences[0].topk_sampled_logprobs, 4),
    ):  # fmt: skip
        assert (found.k, found.length) == (3, length)
        logprobs = np.frombuffer(found.logprobs, "<f4").reshape(length, 3)
        assert (np.diff(logprobs) <= 0).all()
    ids = np.frombuffer(answer.topk_prompt_logprobs.token_ids, "<i4").reshape(-1, 3)
    logprobs = np.frombuffer(answer.topk_prompt_logprobs.logprobs, "<f4").reshape(-1, 3)
    assert ids[0].tolist() == [0, 0, 0]
    assert logprobs[0].tolist() == [-99999.0] * 3
    assert ids[1:].tolist() == top.indices[:-1].tolist()
    np.testing.assert_allclose(logprobs[1:], top.values[:-1].detach().numpy(), atol=1e-4)
    sampled = np.frombuffer(answer.sequences[0].topk_sampled_logprobs.token_ids, "<i4").reshape(4, 3)
    assert sampled[:, 0].tolist() == tokens_of(answer.sequences[0]), "greedy takes the best"


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_line_85_given_targets_are_scored_in_the_layout_that_was_asked(raw: Raw, tiny: Path, layout: str) -> None:
    targets = np.array([[5, 6], [7, -1], [-1, -1], [8, 9]])
    if layout == "dense":
        asked = {"data": targets.ravel().tolist(), "dtype": "int64", "shape": [4, 2]}
    else:
        asked = {
            "data": [5, 6, 7, 8, 9], "dtype": "int64", "shape": [4, 2],
            "sparse_crow_indices": [0, 2, 3, 3, 5], "sparse_col_indices": [0, 1, 0, 0, 1],
        }  # fmt: skip
    answer = raw.sampler().sample(PROMPT, params={"max_tokens": 1}, target_prompt_logprobs=asked)
    found = answer.target_prompt_logprobs
    assert list(found.shape) == [4, 2]
    logps = Reference(tiny).logits(PROMPT).log_softmax(-1).detach().numpy()
    expected = [logps[0, 5], logps[0, 6], logps[1, 7], logps[3, 8], logps[3, 9]]
    if layout == "dense":
        values = np.frombuffer(found.dense, "<f4").reshape(4, 2)[targets >= 0]
    else:
        values = np.frombuffer(found.sparse_csr.values, "<f4")
        assert np.frombuffer(found.sparse_csr.crow_indices, "<i8").tolist() == asked["sparse_crow_indices"]
        assert np.frombuffer(found.sparse_csr.col_indices, "<i8").tolist() == asked["sparse_col_indices"]
    np.testing.assert_allclose(values, expected, atol=1e-4)


def test_line_85_alternatives_for_prompt_tokens_are_drawn(raw: Raw) -> None:
    answer = raw.sampler().sample(PROMPT, params={"max_tokens": 1, "seed": 3}, prompt_alt_tokens_k=4)
    assert list(answer.prompt_alt_tokens.tokens.shape) == [len(PROMPT) - 1, 4]
    assert list(answer.prompt_alt_tokens.logprobs.shape) == [len(PROMPT) - 1, 4]
    logprobs = np.frombuffer(answer.prompt_alt_tokens.logprobs.dense, "<f4")
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()


def test_line_86_numbers_of_samples_may_be_huge_and_are_remembered(raw: Raw) -> None:
    sampler = raw.sampler()
    for number in (3_000_000_017, 5, 0, 2**62):
        body = sampler.body(PROMPT, number=number, params={"max_tokens": 2})
        answers = [raw.post("/asample", body) for _ in range(2)]
        assert answers[0]["request_id"] == answers[1]["request_id"]
        assert answers[0]["sample_sequence_ids"] == answers[1]["sample_sequence_ids"]
        assert raw.result(answers[0]["request_id"], "sample").sequences


@pytest.mark.full
def test_line_87_too_much_at_once_is_a_429_and_the_same_number_may_come_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from serving import ledger

    service = ledger(tmp_path_factory.mktemp("narrow") / "data", {"limits": {"queued": 8}}).start()
    try:
        with Raw(service.url) as raw:
            model = raw.model()
            held = [model.submit("optim_step", number, adam_params={}) for number in range(2, 10)]  # 1 is missing
            sampler = raw.sampler()
            body = sampler.body(PROMPT, params={"max_tokens": 2})
            answer = raw.send("/asample", body)
            assert answer.status_code == 429, answer.text
            assert float(answer.headers["retry-after"]) > 0
            assert answer.json()["detail"]
            first = model.submit("optim_step", 1, adam_params={})
            for request in (first, *held):
                raw.result(request)
            assert raw.result(raw.post("/asample", body)["request_id"], "sample")
    finally:
        service.stop()


def test_line_88_more_than_the_context_is_refused(raw: Raw) -> None:
    sampler = raw.sampler()
    refused(raw, sampler, "512", PROMPT * 20, params={"max_tokens": 500})
    refused(raw, sampler, "512", PROMPT * 200, params={"max_tokens": 1})


BAD_PARAMS = [
    ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", 0), ("max_tokens", 0), ("max_tokens", -3),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("field", "value"), BAD_PARAMS)
def test_parameters_that_make_no_sense_are_refused_by_name(raw: Raw, field: str, value: float) -> None:
    refused(raw, raw.sampler(), field, params={"max_tokens": 2, field: value})


def test_a_prompt_with_a_token_that_does_not_exist_is_refused(raw: Raw) -> None:
    refused(raw, raw.sampler(), "99999", [1, 99999], params={"max_tokens": 2})
    refused(raw, raw.sampler(), "prompt", [], params={"max_tokens": 2})


def test_line_89_a_sampler_says_what_it_is(raw: Raw) -> None:
    model = raw.model()
    path = model.save_sampler("a")
    of_path, of_base = raw.sampler(model.session, 1, model_path=path), raw.sampler(model.session, 2)
    found = raw.get(f"/samplers/{of_path.id}")
    assert (found["sampler_id"], found["base_model"], found["model_path"]) == (of_path.id, raw.base_model(), path)
    found = raw.get(f"/samplers/{of_base.id}")
    assert (found["sampler_id"], found["base_model"], found.get("model_path")) == (of_base.id, raw.base_model(), None)
    assert raw.http.get("/samplers/no-such-sampler").status_code == 404


def test_line_90_a_sampler_keeps_the_weights_it_was_made_with(raw: Raw) -> None:
    model = raw.model()
    model.train(PROMPT * 3, steps=2)
    frozen = model.freeze(0)
    named = raw.sampler(model.session, 1, model_path=model.save_sampler("a"))
    before = frozen.scores(PROMPT * 2)
    model.train([9, 8, 7, 6] * 4, steps=3, lr=3e-2)
    newer = model.freeze(2)
    assert np.array_equal(frozen.scores(PROMPT * 2)[1:], before[1:])
    np.testing.assert_allclose(named.scores(PROMPT * 2)[1:], before[1:], atol=1e-5)
    assert np.abs(newer.scores(PROMPT * 2)[1:] - before[1:]).max() > 0.1


@pytest.mark.full
def test_line_91_inflight_samplers_move_to_the_newest_weights(raw: Raw) -> None:
    model = raw.model()
    model.train(PROMPT * 3, steps=1)
    first, still = model.freeze(0, "inflight"), model.freeze(1)
    before = first.scores(PROMPT * 2)
    model.train([9, 8, 7, 6] * 4, steps=3, lr=3e-2)
    np.testing.assert_allclose(first.scores(PROMPT * 2)[1:], before[1:], atol=1e-5)
    second = model.freeze(2, "inflight")
    end = time.monotonic() + 20
    while np.abs(first.scores(PROMPT * 2)[1:] - before[1:]).max() < 0.1:
        assert time.monotonic() < end, "the first sampler did not move"
    np.testing.assert_allclose(first.scores(PROMPT * 2)[1:], second.scores(PROMPT * 2)[1:], atol=1e-5)
    np.testing.assert_allclose(still.scores(PROMPT * 2)[1:], before[1:], atol=1e-5)


def test_the_sdk_samples_and_reads_every_part(served: Served, tiny: Path) -> None:
    params = sdk.tinker.SamplingParams(max_tokens=5, seed=1, temperature=0.7, stop=[])
    with sdk.opened(served.url) as client:
        sampling = client.create_sampling_client(base_model=str(tiny)).result(60)
        answer = sampling.sample(
            sdk.prompt(PROMPT), 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2
        ).result(60)
    assert [len(sequence.tokens) for sequence in answer.sequences] == [5, 5]
    assert all(len(sequence.logprobs or []) == 5 for sequence in answer.sequences)
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == len(PROMPT)

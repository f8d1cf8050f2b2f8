"""TorchSampler against transformers' own forward and generate."""

import math

import pytest
import torch

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, DataError, NonFiniteError, TrainingStateError, Unsupported
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [7], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(architecture, **overrides):
        key = (architecture, *sorted(overrides.items()))
        if key not in made:
            # Large weights, so that the distributions are far from uniform and greedy choices are clear.
            overrides.setdefault("initializer_range", 0.3)
            made[key] = tiny_model(tmp_path_factory.mktemp(architecture), architecture, **overrides)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def sampler(folders):
    return TorchSampler(folders("llama"))


def rows(prompts=PROMPTS):
    return [{"input_ids": list(ids)} for ids in prompts]


def tokens_of(responses):
    return [[sequence.tokens for sequence in response.sequences] for response in responses]


def forward_logprobs(module, ids, temperature):
    """Log-probability of each token given those before it, by one plain forward in float64."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ids])).logits[0].double()
    table = (logits / temperature).log_softmax(-1)
    return table, [table[at, token].item() for at, token in enumerate(ids[1:])]


@pytest.mark.sample(3)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2", "mistral", "gemma2", "gemma3"])
def test_greedy_is_what_generate_returns_row_by_row(folders, architecture):
    sampler = TorchSampler(folders(architecture))
    ours = tokens_of(sampler.sample(rows(), {"temperature": 0, "max_tokens": 20}))
    for ids, (tokens,) in zip(PROMPTS, ours, strict=True):
        inputs = torch.tensor([ids])
        made = sampler.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20, pad_token_id=256
        )
        assert tokens == made[0, len(ids) :].tolist()


@pytest.mark.full
def test_a_sliding_window_shorter_than_the_text_is_kept_to(folders):
    sampler = TorchSampler(folders("mistral", sliding_window=6))
    ours = tokens_of(sampler.sample(rows(), {"temperature": 0, "max_tokens": 20}))
    for ids, (tokens,) in zip(PROMPTS, ours, strict=True):
        table, _ = forward_logprobs(sampler.model, ids + tokens, 1.0)
        assert tokens == table[len(ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logprobs_are_those_of_a_plain_forward(folders, architecture, temperature):
    sampler = TorchSampler(folders(architecture))
    params = SamplingParams(
        max_tokens=12, seed=3, temperature=temperature, logprobs=3, prompt_logprobs=2, top_p=0.9, top_k=50,
        repetition_penalty=1.2,
    )  # fmt: skip
    for response in sampler.sample(rows(), params):
        (sequence,) = response.sequences
        prompt = response.prompt_token_ids
        table, expected = forward_logprobs(sampler.model, prompt + sequence.tokens, temperature)
        drawn = [pairs[0] for pairs in sequence.logprobs]
        assert [token for token, _ in drawn] == sequence.tokens
        assert [value for _, value in drawn] == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
        assert response.prompt_logprobs[0] is None
        assert response.prompt_logprobs[1:] == pytest.approx(expected[: len(prompt) - 1], abs=1e-4)
        assert all(len(pairs) == 3 for pairs in sequence.logprobs)
        for at, pairs in enumerate(response.topk_prompt_logprobs[1:]):
            best = table[at].topk(2)
            assert [token for token, _ in pairs] == best.indices.tolist()
            assert [value for _, value in pairs] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_greedy_logprobs_are_at_temperature_one(sampler):
    (response,) = sampler.sample(rows([[5, 6, 7]]), {"temperature": 0, "max_tokens": 5, "logprobs": 1})
    tokens = response.sequences[0].tokens
    _, expected = forward_logprobs(sampler.model, [5, 6, 7, *tokens], 1.0)
    assert [pairs[0][1] for pairs in response.sequences[0].logprobs] == pytest.approx(expected[2:], abs=1e-4)
    assert all(len(pairs) == 1 for pairs in response.sequences[0].logprobs)


def test_without_logprobs_there_are_none(sampler):
    for count in (None, 0):
        (response,) = sampler.sample(rows([[5]]), {"max_tokens": 2, "logprobs": count, "prompt_logprobs": count})
        assert response.sequences[0].logprobs is None
        assert response.prompt_logprobs is None
        assert response.topk_prompt_logprobs is None


@pytest.mark.full
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_call(folders):
    wide, narrow = TorchSampler(folders("llama")), TorchSampler(folders("llama"), max_batch_size=2)
    params = SamplingParams(max_tokens=15, seed=11, num_samples=3)
    whole = tokens_of(wide.sample(rows(), params))
    assert tokens_of(wide.sample(rows(), params)) == whole
    assert tokens_of(narrow.sample(rows(), params)) == whole
    assert tokens_of(wide.sample(rows(PROMPTS[:2]), params)) == whole[:2]
    assert tokens_of(wide.sample(rows(), SamplingParams(max_tokens=15, seed=12, num_samples=3))) != whole


def test_samples_of_a_prompt_and_equal_prompts_differ(sampler):
    drawn = tokens_of(
        sampler.sample(rows([[5, 6]] * 2), SamplingParams(max_tokens=12, seed=1, num_samples=3, temperature=2))
    )
    assert len({tuple(tokens) for row in drawn for tokens in row}) == 6


def test_more_samples_keep_the_first_ones(sampler):
    few = tokens_of(sampler.sample(rows(), SamplingParams(max_tokens=8, seed=1, num_samples=2)))
    many = tokens_of(sampler.sample(rows(), SamplingParams(max_tokens=8, seed=1), num_samples=40))
    assert [row[:2] for row in many] == few
    assert all(len(row) == 40 for row in many)


def test_without_a_seed_calls_differ_and_torchs_generator_is_left_alone(sampler):
    before = torch.get_rng_state()
    first, second = (tokens_of(sampler.sample(rows(), {"max_tokens": 12, "temperature": 2})) for _ in range(2))
    assert first != second
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    third = tokens_of(sampler.sample(rows(), {"max_tokens": 12, "temperature": 2}))
    torch.manual_seed(5)
    assert tokens_of(sampler.sample(rows(), {"max_tokens": 12, "temperature": 2})) != third
    torch.set_rng_state(before)


def test_tokens_come_as_often_as_the_model_says(sampler):
    count = 3000
    (response,) = sampler.sample(rows([[5, 6, 7]]), {"max_tokens": 1, "seed": 9, "top_k": 8, "num_samples": count})
    table, _ = forward_logprobs(sampler.model, [5, 6, 7], 1.0)
    best = table[-1].topk(8)
    probs = best.values.softmax(-1)
    drawn = torch.tensor([sequence.tokens[0] for sequence in response.sequences])
    counts = torch.stack([(drawn == token).sum() for token in best.indices]).double()
    assert counts.sum() == count
    chi_square = ((counts - probs * count) ** 2 / (probs * count)).sum().item()
    assert chi_square < 7 + 4 * math.sqrt(14)


def test_max_tokens_zero_scores_the_prompt_only(sampler):
    responses = sampler.sample(rows(), SamplingParams(max_tokens=0, prompt_logprobs=4, num_samples=2))
    for ids, response in zip(PROMPTS, responses, strict=True):
        assert [sequence.tokens for sequence in response.sequences] == [[], []]
        assert response.sequences[0].stop_reason == "length"
        assert response.sequences[0].new_input_feature is None
        _, expected = forward_logprobs(sampler.model, ids, 1.0)
        assert response.prompt_logprobs == [None, *(pytest.approx(value, abs=1e-4) for value in expected)]
        assert [None if pairs is None else len(pairs) for pairs in response.topk_prompt_logprobs] == [None] + [4] * (
            len(ids) - 1
        )


def test_prompts_are_scored_in_small_batches_when_logits_are_large(sampler, monkeypatch):
    params = SamplingParams(max_tokens=3, seed=2, prompt_logprobs=1)
    expected = sampler.sample(rows(), params)
    monkeypatch.setattr("twinkle_transformers.sampling.decode_loop._SCORING_BYTES", 1)
    for ours, theirs in zip(sampler.sample(rows(), params), expected, strict=True):
        assert ours.sequences[0].tokens == theirs.sequences[0].tokens
        assert ours.prompt_logprobs[1:] == pytest.approx(theirs.prompt_logprobs[1:], abs=1e-5)


def test_a_stop_token_ends_a_sequence_and_is_its_last(sampler):
    params = {"temperature": 0, "max_tokens": 12}
    (free,) = sampler.sample(rows([[5, 6, 7]]), params)
    stop = free.sequences[0].tokens[4]
    (response,) = sampler.sample(rows([[5, 6, 7]]), {**params, "stop": [stop]})
    (sequence,) = response.sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens == free.sequences[0].tokens[: free.sequences[0].tokens.index(stop) + 1]


def test_the_models_own_end_token_ends_it(sampler):
    (free,) = sampler.sample(rows([[5, 6, 7]]), {"temperature": 0, "max_tokens": 12})
    assert free.sequences[0].stop_reason == "length"
    config, token = sampler.model.generation_config, free.sequences[0].tokens[3]
    before = config.eos_token_id
    config.eos_token_id = [258, token]
    try:
        (response,) = sampler.sample(rows([[5, 6, 7]]), {"temperature": 0, "max_tokens": 12})
    finally:
        config.eos_token_id = before
    assert response.sequences[0].stop_reason == "stop"
    assert response.sequences[0].tokens[-1] == token


@pytest.mark.full
def test_a_stop_string_ends_it_and_is_not_decoded(sampler):
    ids = [5, 6, 7]
    for seed in range(50):
        (free,) = sampler.sample(rows([ids]), {"seed": seed, "max_tokens": 20, "temperature": 1.5})
        text = free.sequences[0].decoded
        if len(text) > 8 and text.isprintable() and "�" not in text[3:6]:
            break
    stop = text[3:6]
    (response,) = sampler.sample(
        rows([ids]), {"seed": seed, "max_tokens": 20, "temperature": 1.5, "stop": ["@@@@", stop]}
    )
    (sequence,) = response.sequences
    assert sequence.stop_reason == "stop"
    assert sequence.decoded == text[: text.index(stop)]
    assert sequence.tokens == free.sequences[0].tokens[: len(sequence.tokens)]
    assert sampler.template.decode(sequence.tokens, skip_special_tokens=True).endswith(stop)


def test_a_trajectory_becomes_a_row_to_train_on(sampler):
    trajectory = {"messages": [{"role": "user", "content": "hi"}], "user_data": [("key", "1")]}
    (response,) = sampler.sample(trajectory, {"max_tokens": 5, "seed": 1, "logprobs": 1})
    prompt = sampler.encode_trajectory(trajectory)["input_ids"]
    tokens = response.sequences[0].tokens
    row = response.sequences[0].new_input_feature
    assert response.prompt_token_ids == prompt
    assert row["input_ids"] == prompt + tokens
    assert [label for label in row["labels"] if label != -100] == tokens
    assert row["labels"][len(prompt) - 1] == tokens[0]
    assert row["messages"][-1] == {"role": "assistant", "content": sampler.decode_response(tokens)}
    assert row["user_data"] == [("key", "1")]


def test_padding_in_a_row_is_not_read(sampler):
    params = {"temperature": 0, "max_tokens": 6}
    padded = {"input_ids": torch.tensor([0, 0, 5, 6, 7, 0]), "attention_mask": torch.tensor([0, 0, 1, 1, 1, 0])}
    assert tokens_of(sampler.sample(padded, params)) == tokens_of(sampler.sample(rows([[5, 6, 7]]), params))


def test_the_context_bounds_what_is_drawn(folders):
    sampler = TorchSampler(folders("llama", max_position_embeddings=16))
    responses = sampler.sample(rows([[1, 2, 3], list(range(1, 16))]), {"seed": 1, "stop": []})
    assert [len(response.sequences[0].tokens) for response in responses] == [13, 1]
    assert [response.sequences[0].stop_reason for response in responses] == ["length", "length"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("length", "max_tokens"), [(17, 1), (17, 0), (16, 1)])
def test_a_prompt_that_leaves_no_room_names_both_lengths(folders, length, max_tokens):
    sampler = TorchSampler(folders("llama", max_position_embeddings=16))
    with pytest.raises(DataError, match=f"row 1 has {length} tokens, the model's context 16"):
        sampler.sample(rows([[1], [1] * length]), {"max_tokens": max_tokens})


def test_without_rows_there_are_no_responses(sampler):
    assert sampler.sample([]) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ([{"input_ids": []}], DataError, "row 0 has no tokens"),
        ([{"input_ids": [1]}, {"input_ids": [264]}], DataError, "row 1: token 264 is outside .* 264"),
        ([{"input_ids": [-1]}], DataError, "token -1"),
        ([{"input_ids": [[1, 2], [3, 4]]}], DataError, "not a batch"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], DataError, "attention_mask has 1 values for 2"),
        ([{"input_ids": [1]}, {"messages": [{"role": "user", "content": "a"}]}], DataError, "mix encoded rows"),
        (["text"], DataError, "row 0 is a str"),
        ([{"input_ids": [1], "pixel_values": [0]}], Unsupported, "pixel_values"),
    ],
)
def test_a_bad_input_is_refused_by_name(sampler, inputs, error, text):
    with pytest.raises(error, match=text):
        sampler.sample(inputs, {"max_tokens": 1})


def test_unknown_keywords_and_parameters_are_refused(sampler):
    with pytest.raises(TypeError, match="num_sample"):
        sampler.sample(rows(), num_sample=2)
    with pytest.raises(ArgumentError, match="max_tokens"):
        sampler.sample(rows(), {"max_token": 2})


def test_the_given_parameters_are_left_as_they_are(sampler):
    params = {"max_new_tokens": 2, "seed": 1}
    sampler.sample(rows(), params, num_samples=2)
    assert params == {"max_new_tokens": 2, "seed": 1}


def test_broken_weights_are_named_instead_of_sampled(folders):
    sampler = TorchSampler(folders("llama"))
    with torch.no_grad():
        sampler.model.lm_head.weight[3].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="row 0: the model's logits are NaN"):
        sampler.sample(rows(), {"max_tokens": 1})


def test_a_row_of_broken_numbers_is_named_by_its_place_in_the_call(folders):
    sampler = TorchSampler(folders("llama"))
    with torch.no_grad():
        sampler.model.model.embed_tokens.weight[200].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="row 1"):
        sampler.sample(rows([[1, 2, 3, 4], [1, 200], [3]]), {"max_tokens": 1})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "either model_id= .* or model="),
        ({"model_id": "a", "model": torch.nn.Linear(2, 2)}, "either model_id= .* or model="),
        ({"model": 3}, "model is a int"),
        ({"model": torch.nn.Linear(2, 2), "device": "cpu"}, "device cannot be set for a shared model"),
        ({"model": torch.nn.Linear(2, 2), "attn_implementation": "eager"}, "attn_implementation cannot be set"),
        ({"model_id": "a", "max_batch_size": 0}, "max_batch_size is 0"),
    ],
)
def test_constructor_arguments_that_make_no_sense_are_refused(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        TorchSampler(**arguments)


def test_a_bare_module_samples_tokens_and_asks_for_a_template_when_text_is_needed(sampler, folders):
    bare = TorchSampler(model=sampler.model)
    params = {"temperature": 0, "max_tokens": 4}
    (response,) = bare.sample(rows([[5]]), params)
    assert response.sequences[0].decoded is None
    assert tokens_of([response]) == tokens_of(sampler.sample(rows([[5]]), params))
    with pytest.raises(TrainingStateError, match="set_template"):
        bare.sample({"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(TrainingStateError, match="set_template"):
        bare.sample(rows(), {"stop": "x"})
    bare.set_template("Template", model_id=str(folders("llama")))
    assert bare.sample(rows([[5]]), params)[0].sequences[0].decoded is not None


def test_a_patch_reaches_the_module(sampler):
    from twinkle.patch import Patch

    seen = []

    class Note(Patch):
        def __call__(self, module, *args, **kwargs):
            seen.append(id(module))

    sampler.apply_patch(Note)
    assert seen == [id(sampler.model)]


@pytest.mark.full
def test_layers_with_a_recurrent_state_are_cached_repeated_and_dropped_too():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.3, eos_token_id=258, pad_token_id=256, bos_token_id=257,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Qwen3_5ForCausalLM(config)
    assert "linear_attention" in config.layer_types
    params = SamplingParams(max_tokens=15, seed=1, logprobs=1, num_samples=3, stop=list(range(40)))
    for response in TorchSampler(model=module).sample(rows(), params):
        for sequence in response.sequences:
            ids = response.prompt_token_ids
            _, expected = forward_logprobs(module.eval(), ids + sequence.tokens, 1.0)
            drawn = [pairs[0][1] for pairs in sequence.logprobs]
            assert drawn == pytest.approx(expected[len(ids) - 1 :], abs=1e-3)

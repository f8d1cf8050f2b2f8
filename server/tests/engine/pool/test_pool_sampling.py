"""Sampling of the torch backend: the semantics that clients count on, against the training forward and PEFT."""

import numpy as np
import pytest
import torch
from server_pool import VOCABULARY, Bench, datum
from server_reference import Reference

from twinkle.testing import tiny_config, tiny_model, tiny_tokenizer
from twinkle_server.engine.errors import UserError
from twinkle_server.operations import Sample
from twinkle_server.wire.codec import EMPTY_LOGPROB, Sparse, read_sample_response

EOS = 258
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id",
)  # fmt: skip
PROMPT = [72, 105, 44, 32, 121, 111, 117, 33, 10, 65, 66, 67]


@pytest.fixture(scope="module")
def source(shared):
    return shared.save("a", "sampler_weights")


def rescored(bench, tokens):
    """Return the log-probability of every token but the first, by the training forward."""
    inputs = {"target_tokens": np.asarray(tokens[1:], np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    [found], _ = bench.run("a", [(tokens[:-1], inputs)], forward=True)
    return found


@pytest.mark.full
def test_sampled_logprobs_are_those_of_the_training_forward(shared, source):
    sequences, _ = shared.sample(PROMPT, source, count=3, max_tokens=12, seed=5, stop=[])
    for sequence in sequences:
        expected = rescored(shared, [*PROMPT, *sequence.tokens.tolist()])[len(PROMPT) - 1 :]
        assert sequence.logprobs == pytest.approx(expected, abs=1e-4)


def test_samples_of_a_request_differ_and_come_again_by_their_seeds(shared, source):
    first, _ = shared.sample(PROMPT, source, count=3, max_tokens=8, seed=5, stop=[])
    again, _ = shared.sample(PROMPT, source, count=3, max_tokens=8, seed=5, stop=[])
    second, _ = shared.sample(PROMPT, source, count=1, max_tokens=8, seed=6, stop=[])
    texts = [tuple(sequence.tokens) for sequence in first]
    assert texts == [tuple(sequence.tokens) for sequence in again]
    assert len(set(texts)) == 3
    assert tuple(second[0].tokens) == texts[1]


def test_temperature_zero_takes_the_most_probable_token(shared, source):
    other = Reference(shared.base, source)
    [sequence], _ = shared.sample(PROMPT, source, max_tokens=8, temperature=0.0, stop=[])
    tokens = list(PROMPT)
    for token in sequence.tokens.tolist():
        assert token == int(other.logits(tokens)[-1].argmax())
        tokens.append(token)


def test_a_checkpoint_keeps_its_weights_while_the_model_trains_on(shared):
    source = shared.save("b", "sampler_weights")
    before, _ = shared.sample(PROMPT, source, max_tokens=10, temperature=0.0, stop=[])
    shared.run("b", [datum(9, 77)])
    shared.step("b", learning_rate=0.1)
    after, _ = shared.sample(PROMPT, source, max_tokens=10, temperature=0.0, stop=[])
    newer, _ = shared.sample(PROMPT, shared.save("b", "sampler_weights"), max_tokens=10, temperature=0.0, stop=[])
    assert before[0].logprobs.tolist() == after[0].logprobs.tolist()
    assert before[0].logprobs.tolist() != newer[0].logprobs.tolist()


def test_without_a_source_it_is_the_base_model(shared):
    other = Reference(shared.base)
    _, prompt = shared.sample(PROMPT, None, max_tokens=1, prompt_logprobs=True)
    assert prompt.logprobs[1:] == pytest.approx(other.scores(PROMPT).numpy(), abs=1e-4)


def test_other_temperatures_report_the_scaled_distribution(shared, source):
    [sequence], _ = shared.sample(PROMPT, source, max_tokens=1, temperature=2.5, seed=1, stop=[])
    other = Reference(shared.base, source)
    scaled = (other.logits(PROMPT)[-1] / 2.5).log_softmax(-1)
    assert sequence.logprobs[0] == pytest.approx(float(scaled[sequence.tokens[0]].detach()), abs=1e-4)


def test_truncation_leaves_logprobs_of_the_whole_distribution(shared, source):
    other = Reference(shared.base, source).logits(PROMPT)[-1].detach()
    best = other.topk(4).indices.tolist()
    for seed in range(6):
        [sequence], _ = shared.sample(PROMPT, source, max_tokens=1, top_k=4, seed=seed, stop=[])
        assert sequence.tokens[0] in best
        assert sequence.logprobs[0] == pytest.approx(float(other.log_softmax(-1)[sequence.tokens[0]]), abs=1e-4)


def test_tokens_come_as_often_as_the_distribution_says(shared, source):
    """Chi-square over the classes of one token each, p = 0.001; seeds are fixed."""
    other = Reference(shared.base, source).logits(PROMPT)[-1].detach()
    wanted = (other / 1.3).topk(8).values.softmax(-1).double()
    ids = other.topk(8).indices.tolist()
    count = 400
    sequences, _ = shared.sample(PROMPT, source, count=count, max_tokens=1, temperature=1.3, top_k=8, seed=1, stop=[])
    found = torch.tensor([sum(int(s.tokens[0]) == token for s in sequences) for token in ids], dtype=torch.float64)
    assert int(found.sum()) == count
    assert float(((found - count * wanted) ** 2 / (count * wanted)).sum()) < 24.32


def find_stop(bench, source, **options):
    """Return the greedy text of eight tokens."""
    [sequence], _ = bench.sample(PROMPT, source, max_tokens=8, temperature=0.0, stop=[], **options)
    assert sequence.stop == "length"
    assert len(sequence.tokens) == 8
    return sequence.tokens.tolist()


def test_a_stop_token_ends_the_sequence_and_is_its_last_token_once(shared, source):
    whole = find_stop(shared, source)
    stop = next(token for at, token in enumerate(whole) if at and token not in whole[:at])
    [sequence], _ = shared.sample(PROMPT, source, max_tokens=8, temperature=0.0, stop=[stop])
    assert sequence.stop == "stop"
    assert sequence.tokens.tolist() == whole[: whole.index(stop) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_a_stop_string_ends_the_sequence_and_is_in_it(shared, source):
    from transformers import AutoTokenizer

    sequences, _ = shared.sample(PROMPT, source, count=40, max_tokens=30, seed=3, stop=["K", "Q", "Z"])
    tokenizer = AutoTokenizer.from_pretrained(shared.base)
    ended = [s for s in sequences if s.stop == "stop" and s.tokens[-1] != EOS]
    assert ended
    for sequence in ended:
        text = tokenizer.decode(sequence.tokens.tolist())
        assert text[-1] in "KQZ"
        assert not set(text[:-1]) & set("KQZ")
    for sequence in sequences:
        if sequence.stop == "length":
            assert len(sequence.tokens) == 30


def test_only_an_empty_list_goes_on_behind_the_end_token(base, tmp_path, fresh):
    """A model whose end token is what it says next ends at once, unless `stop` is an empty list."""
    bench = fresh()
    [first], _ = bench.sample(PROMPT, None, max_tokens=1, temperature=0.0, stop=[])
    token = int(first.tokens[0])
    bench.model.model.generation_config.eos_token_id = token
    for stop in (None, ["zzzz"], [(token + 1) % 256]):
        [sequence], _ = bench.sample(PROMPT, None, max_tokens=6, temperature=0.0, stop=stop)
        assert (sequence.tokens.tolist(), sequence.stop) == ([token], "stop")
    [sequence], _ = bench.sample(PROMPT, None, max_tokens=6, temperature=0.0, stop=[])
    assert (len(sequence.tokens), sequence.stop) == (6, "length")


def test_without_max_tokens_it_goes_on_to_the_end_of_the_context(bench):
    prompt = [65] * 500
    [sequence], _ = bench.sample(prompt, None, stop=[])
    assert (len(sequence.tokens), sequence.stop) == (12, "length")


def test_prompt_logprobs_are_the_forwards_whatever_the_temperature(shared, source):
    _, prompt = shared.sample(PROMPT, source, max_tokens=1, temperature=0.3, prompt_logprobs=True)
    assert len(prompt.logprobs) == len(PROMPT)
    assert np.isnan(prompt.logprobs[0])
    assert prompt.logprobs[1:] == pytest.approx(rescored(shared, PROMPT), abs=1e-4)
    assert prompt.topk is None


@pytest.mark.parametrize("last", [0, 1, 5, 12, 50])
def test_only_the_last_prompt_logprobs_are_there_if_so_asked(shared, source, last):
    _, prompt = shared.sample(PROMPT, source, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=last)
    finite = min(last, len(PROMPT) - 1)
    assert np.isnan(prompt.logprobs).tolist() == [True] * (len(PROMPT) - finite) + [False] * finite
    if finite:
        assert prompt.logprobs[-finite:] == pytest.approx(rescored(shared, PROMPT)[-finite:], abs=1e-4)


def test_the_likeliest_tokens_of_prompt_and_answer(shared, source):
    other = Reference(shared.base, source)
    [sequence], prompt = shared.sample(
        PROMPT, source, max_tokens=4, seed=2, stop=[], topk_prompt_logprobs=3, topk_sample_logprobs=2
    )
    assert prompt.logprobs[1:] == pytest.approx(rescored(shared, PROMPT), abs=1e-4)
    table = other.logits([*PROMPT, *sequence.tokens.tolist()]).log_softmax(-1).detach()
    assert prompt.topk.tokens.shape == (len(PROMPT), 3)
    assert prompt.topk.tokens[0].tolist() == [0, 0, 0]
    assert prompt.topk.logprobs[0].tolist() == [EMPTY_LOGPROB] * 3
    for at in range(1, len(PROMPT)):
        assert prompt.topk.tokens[at].tolist() == table[at - 1].topk(3).indices.tolist()
        assert prompt.topk.logprobs[at] == pytest.approx(table[at - 1].topk(3).values.numpy(), abs=1e-4)
    for at in range(4):
        row = table[len(PROMPT) - 1 + at]
        assert sequence.topk.tokens[at].tolist() == row.topk(2).indices.tolist()
        assert sequence.topk.logprobs[at] == pytest.approx(row.topk(2).values.numpy(), abs=1e-4)


def test_targets_are_scored_in_the_layout_of_the_question(shared, source):
    table = Reference(shared.base, source).logits(PROMPT).log_softmax(-1).detach()
    targets = np.array([[5, -1, 9], [-1, -1, -1], [200, 3, 3]])
    dense = {"data": targets.reshape(-1).tolist(), "shape": [3, 3], "dtype": "int64"}
    _, prompt = shared.sample(PROMPT, source, max_tokens=1, targets=dense)
    assert prompt.targets.shape == (3, 3)
    for row, column in np.ndindex(3, 3):
        if targets[row, column] < 0:
            assert not np.isfinite(prompt.targets[row, column]) or prompt.targets[row, column] == EMPTY_LOGPROB
        else:
            expected = float(table[row, targets[row, column]])
            assert prompt.targets[row, column] == pytest.approx(expected, abs=1e-4)
    sparse = {
        "data": [5, 9, 200], "shape": [4, 7], "sparse_crow_indices": [0, 2, 2, 3, 3], "sparse_col_indices": [0, 6, 2],
    }  # fmt: skip
    _, prompt = shared.sample(PROMPT, source, max_tokens=1, targets=sparse)
    assert isinstance(prompt.targets, Sparse)
    assert (prompt.targets.shape, prompt.targets.rows.tolist()) == ((4, 7), [0, 2, 2, 3, 3])
    assert prompt.targets.columns.tolist() == [0, 6, 2]
    expected = [float(table[0, 5]), float(table[0, 9]), float(table[2, 200])]
    assert prompt.targets.values == pytest.approx(expected, abs=1e-4)


def test_other_draws_at_every_place_of_the_prompt(shared, source):
    table = (Reference(shared.base, source).logits(PROMPT) / 0.7).log_softmax(-1).detach()
    _, prompt = shared.sample(PROMPT, source, max_tokens=1, temperature=0.7, seed=3, alternatives=5)
    tokens, logprobs = prompt.alternatives
    assert tokens.shape == logprobs.shape == (len(PROMPT) - 1, 5)
    for at in range(len(PROMPT) - 1):
        assert logprobs[at] == pytest.approx(table[at][torch.tensor(tokens[at])].numpy(), abs=1e-4)
    assert len({tuple(row) for row in tokens.tolist()}) > 1


def test_a_prompt_that_comes_again_is_found_in_the_cache(shared, source):
    prompt = list(range(40))
    _, first = shared.sample(prompt, source, max_tokens=1)
    _, second = shared.sample(prompt, source, max_tokens=1)
    assert (first.hits, second.hits) == (0, 32)


def test_requests_of_many_sources_run_side_by_side_and_one_that_is_cancelled_goes(shared, source):
    alone = [shared.sample(PROMPT, where, max_tokens=6, seed=4, stop=[])[0] for where in (source, None)]
    for key, where in ((1001, source), (1002, None), (1003, source)):
        shared.executor.sample(key, Sample(PROMPT, max_tokens=6, seed=4, stop=[]), where)
    assert shared.executor.sampling == 3
    shared.executor.cancel(1003)
    shared.executor.cancel(4711)
    over = {}
    for _ in range(100):
        over |= {found.key: found for found in shared.executor.decode()}
        if not shared.executor.sampling:
            break
    assert over.keys() == {1001, 1002}
    for key, expected in ((1001, alone[0]), (1002, alone[1])):
        [mine], _ = read_sample_response(over[key].result)
        assert mine.tokens.tolist() == expected[0].tokens.tolist()
        assert over[key].tokens == 6


def test_weights_that_nobody_samples_from_are_forgotten_beyond_a_bound(shared, monkeypatch):
    sources = shared.executor._samples._versions
    folders = [shared.save("a", "sampler_weights") for _ in range(3)]
    monkeypatch.setattr(sources, "_kept", 0)
    for folder in folders:
        shared.sample(PROMPT, folder, max_tokens=1)
    assert len(sources) == 0


def test_weights_that_are_gone_or_damaged_are_an_error_and_never_the_base(shared, tmp_path):
    source = shared.save("a", "sampler_weights")
    with pytest.raises(UserError, match="does not exist; it was deleted"):
        shared.sample(PROMPT, tmp_path / "nowhere", max_tokens=1)
    (source / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="damaged"):
        shared.sample(PROMPT, source, max_tokens=1)
    assert shared.executor.sampling == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": []}, "prompt is empty"),
        ({"tokens": [1, VOCABULARY]}, f"got {VOCABULARY}"),
        ({"tokens": [-1]}, "got -1"),
        ({"tokens": [1] * 512}, "512 tokens"),
        ({"tokens": [1] * 500, "max_tokens": 13}, "at most 12 .*512"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"count": 0}, "num_samples must be .*got 0"),
        ({"temperature": -1.0}, "temperature must be .*got -1"),
        ({"temperature": float("nan")}, "temperature must be .*got nan"),
        ({"top_k": 0}, "top_k must be .*got 0"),
        ({"top_p": 0.0}, "top_p must be .*got 0"),
        ({"top_p": 1.5}, "top_p must be .*got 1.5"),
        ({"stop": [""]}, "non-empty"),
        ({"stop": [True]}, "token ids"),
        ({"stop": [VOCABULARY]}, f"got {VOCABULARY}"),
        ({"stop": [[1]]}, "token ids"),
        ({"prompt_logprobs_last_n": 3}, "requires prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": -3}, "at least 0"),
        ({"topk_prompt_logprobs": 5000}, "topk_prompt_logprobs must be .*got 5000"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs must be .*got -1"),
        ({"alternatives": 5000}, "prompt_alt_tokens_k must be .*got 5000"),
        ({"targets": {"data": [1], "shape": [2]}}, "the shape must have"),
        ({"targets": {"data": [VOCABULARY], "shape": [1]}}, f"got {VOCABULARY}"),
        ({"targets": {"data": [1] * 20, "shape": [20, 1]}}, "got 20"),
        (
            {"targets": {"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 2], "sparse_col_indices": [0]}},
            "row po",
        ),
    ],
)
def test_what_makes_no_sense_is_said_at_once(shared, options, words):
    sample = Sample(**{"tokens": PROMPT, "max_tokens": 4, **options})
    with pytest.raises(UserError, match=words):
        shared.executor.sample(1, sample, None)
    assert shared.executor.sampling == 0


@pytest.mark.full
def test_adapters_of_a_mixture_of_experts_are_sampled_from(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    base = tmp_path / "experts"
    sizes = {name: getattr(tiny_config("qwen3"), name) for name in _SIZES}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, **sizes)
    Qwen3MoeForCausalLM(config).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    bench = Bench(base, tmp_path)
    bench.create("a")
    bench.shake("a")
    assert any("experts" in name for name in bench.weights("a"))
    _, prompt = bench.sample(PROMPT, bench.save("a", "sampler_weights"), max_tokens=1, prompt_logprobs=True)
    assert prompt.logprobs[1:] == pytest.approx(rescored(bench, PROMPT), abs=1e-4)
    _, plain = bench.sample(PROMPT, None, max_tokens=1, prompt_logprobs=True)
    assert plain.logprobs[1:] != pytest.approx(prompt.logprobs[1:], abs=1e-2)
    bench.executor.restore("b", bench.snapshot("a"))
    assert bench.weights("b").keys() == bench.weights("a").keys()


def test_sampling_goes_on_between_the_pieces_of_a_long_pass(shared, source, monkeypatch):
    alone, _ = shared.sample(PROMPT, source, max_tokens=4, seed=4, stop=[])
    rows = [datum(40, at) for at in range(6)]
    expected, said = shared.run("a", rows, forward=True)
    over = []
    pool = shared.pool
    monkeypatch.setattr(pool, "between", pool.between)
    monkeypatch.setattr(pool, "tokens_per_pass", 50)  # a row and a bit

    def between() -> None:
        if not over:  # it comes in the middle of the pass
            shared.executor.sample(1, Sample(PROMPT, max_tokens=4, seed=4, stop=[]), source)
        over.append(shared.executor.decode())

    shared.executor.interrupt(between)
    found, metrics = shared.run("a", rows)
    assert len(over) == 5
    [sampled] = [item for items in over for item in items]
    assert not shared.executor.sampling
    [mine], _ = read_sample_response(sampled.result)
    assert mine.tokens.tolist() == alone[0].tokens.tolist()
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert metrics["loss:sum"] == pytest.approx(said["loss:sum"], rel=1e-5)


@pytest.mark.full
def test_a_model_without_tokenizer_samples_and_refuses_to_stop_at_texts(tmp_path):
    base = tiny_model(tmp_path / "base", "qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    bench = Bench(base, tmp_path)
    assert bench.executor.describe().tokenizer == ""
    sequences, _ = bench.sample(PROMPT, max_tokens=4, stop=[5])
    assert len(sequences[0].tokens) > 0
    with pytest.raises(
        UserError, match="cannot use the stop string 'x': the folder of the served model has no tokenizer"
    ):
        bench.sample(PROMPT, max_tokens=4, stop=["x"])

"""TorchSampler as an engine: many requests and adapters in one batch, each as if it were alone."""

import logging
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, CapacityError, NonFiniteError
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.engine.adapters import sites_of
from twinkle_transformers.loading import load_model
from twinkle_transformers.pool.sites import install
from twinkle_transformers.stopping import StopRule

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(0, 256, (n,), generator=GENERATOR).tolist() for n in (3, 21, 1, 40, 8, 16, 17, 5, 33)]
LENGTHS = (9, 20, 14, 3, 25, 11, 6, 18, 12)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base"), "qwen3", initializer_range=0.3)


@pytest.fixture(scope="module")
def module(folder):
    return load_model(folder)[0]


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Folders of adapters of several ranks and targets, and PEFT's model with all of them."""
    target = tmp_path_factory.mktemp("adapters")
    model, _ = load_model(folder)
    configs = {
        "small": LoraConfig(r=2, target_modules="all-linear"),
        "other": LoraConfig(r=2, target_modules="all-linear"),
        "large": LoraConfig(r=6, lora_alpha=12, target_modules=["q_proj", "down_proj"], use_rslora=True),
        "head": LoraConfig(r=3, target_modules=["v_proj", "lm_head"], rank_pattern={"v_proj": 4}),
    }
    wrapped = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, config in configs.items():
            if wrapped is None:
                wrapped = get_peft_model(model, config, adapter_name=name)
            else:
                wrapped.add_adapter(name, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(target, save_embedding_layers=False)
    return target, wrapped.eval()


def rows(prompts=PROMPTS):
    return [{"input_ids": list(ids)} for ids in prompts]


def tokens_of(responses):
    return [[sequence.tokens for sequence in response.sequences] for response in responses]


def sampler_of(folder, **kwargs):
    sampler = TorchSampler(folder, **kwargs)
    assert sampler._service.engine is not None
    return sampler


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


def logprobs_by_forward(module, ids, temperature=1.0):
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ids])).logits[0].double()
    table = (logits / temperature).log_softmax(-1)
    return [table[at, token].item() for at, token in enumerate(ids[1:])]


# Models


def tiny(name):
    import transformers

    common = {
        "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "initializer_range": 0.3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 256, "bos_token_id": 257,
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    moe = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    latent = {
        "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "first_k_dense_replace": 1,
    }  # fmt: skip
    kinds = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", {}),
        "mistral": ("Mistral", {"sliding_window": 6}),
        "gemma2": ("Gemma2", {"sliding_window": 6}),
        "gemma3": ("Gemma3", {"sliding_window": 6}),
        "gpt_oss": ("GptOss", rope | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "deepseek_v3": ("DeepseekV3", moe | latent),
        "qwen3_moe": ("Qwen3Moe", moe | {"num_experts": 4}),
    }  # fmt: skip
    kind, extra = kinds[name]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**(common | extra))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"]
)
def test_greedy_is_what_generate_returns_whatever_else_is_in_the_batch(name):
    module = tiny(name)
    sampler = TorchSampler(model=module, max_batch_size=4, prefill_tokens=12)
    assert sampler._service.engine is not None
    handles = [
        sampler.submit(row, {"temperature": 0, "max_tokens": length, "logprobs": 1})
        for row, length in zip(rows(), LENGTHS, strict=True)
    ]
    for ids, length, handle in zip(PROMPTS, LENGTHS, handles, strict=True):
        inputs = torch.tensor([ids])
        made = module.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=length, pad_token_id=256
        )
        (sequence,) = handle.result().sequences
        assert sequence.tokens == made[0, len(ids) :].tolist()
        expected = logprobs_by_forward(module, ids + sequence.tokens)[len(ids) - 1 :]
        assert [pairs[0][1] for pairs in sequence.logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_model_with_a_state_of_another_kind_takes_the_slower_path_and_says_so_once(caplog):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.3, eos_token_id=258, pad_token_id=256, bos_token_id=257,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampler = TorchSampler(model=Qwen3_5ForCausalLM(config).eval())
    params = {"temperature": 0, "max_tokens": 6}
    with caplog.at_level(logging.INFO, logger="twinkle"):
        first, second = (sampler.sample(rows(PROMPTS[:2]), params) for _ in range(2))
    said = [record.getMessage() for record in caplog.records if "step by step" in record.getMessage()]
    assert len(said) == 1
    assert "Qwen3_5GatedDeltaNet keeps a state of its own" in said[0]
    assert tokens_of(first) == tokens_of(second)
    handles = [sampler.submit(row, params) for row in rows(PROMPTS[:2])]
    handles[1].cancel()
    assert list(handles[0].tokens()) == first[0].sequences[0].tokens
    assert handles[1].result().sequences[0].stop_reason == "abort"


def test_a_rotary_embedding_that_depends_on_the_batch_takes_the_slower_path(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = tiny_model(tmp_path / "dynamic", "llama", rope_parameters=rope)
    assert TorchSampler(folder)._service.engine is None


# Adapters


def test_adapters_and_base_in_one_batch_score_what_a_training_forward_scores(folder, module, adapters):
    target, peft = adapters
    sampler = sampler_of(folder, max_batch_size=6, prefill_tokens=30)
    for name in ("small", "large", "head", "other"):
        sampler.add_adapter_to_sampler(name, target / name)
    names = [None, "small", "large", "head", "other", "small", None, "head", "large"]
    params = {"max_tokens": 10, "seed": 3, "temperature": 0.8, "logprobs": 1, "prompt_logprobs": 1}
    responses = sampler.sample(rows(), params, adapter_name=names)
    for ids, name, response in zip(PROMPTS, names, responses, strict=True):
        (sequence,) = response.sequences
        model = module
        if name is not None:
            peft.set_adapter(name)
            model = peft
        expected = logprobs_by_forward(model, ids + sequence.tokens, 0.8)
        assert [pairs[0][1] for pairs in sequence.logprobs] == pytest.approx(expected[len(ids) - 1 :], abs=1e-4)
        assert response.prompt_logprobs == [None, *(pytest.approx(v, abs=1e-4) for v in expected[: len(ids) - 1])]


def test_greedy_with_adapters_is_what_peft_generates_row_by_row(folder, adapters):
    target, peft = adapters
    sampler = sampler_of(folder, max_batch_size=5)
    names = ["small", "large", "head", "other"]
    for name in names:
        sampler.add_adapter_to_sampler(name, target / name)
    asked = [names[number % 4] for number in range(len(PROMPTS))]
    found = tokens_of(sampler.sample(rows(), {"temperature": 0, "max_tokens": 12, "stop": []}, adapter_name=asked))
    for ids, name, (tokens,) in zip(PROMPTS, asked, found, strict=True):
        peft.set_adapter(name)
        inputs = torch.tensor([ids])
        made = peft.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=256,
        )
        assert tokens == made[0, len(ids) :].tolist()


def test_a_seed_gives_the_same_tokens_whatever_else_is_sampled(folder, adapters):
    target, _ = adapters
    sampler = sampler_of(folder, max_batch_size=12)
    params = SamplingParams(max_tokens=12, seed=11, num_samples=3)
    alone = {
        name: tokens_of(sampler.sample(rows([PROMPTS[1]]), params, adapter_path=name and target / name))
        for name in ("small", "large", None)
    }
    sampler.reset_prefix_cache()
    noise = [sampler.submit(row, {"max_tokens": 60, "temperature": 1.5}) for row in rows(PROMPTS[3:])]
    handles = {name: sampler.submit(rows()[1], params, adapter_path=name and target / name) for name in alone}
    for name, handle in handles.items():
        assert tokens_of([handle.result()]) == alone[name]
    assert not all(handle.done for handle in noise)


def test_an_adapter_of_a_live_model_is_kept_while_training_goes_on(folder):
    model = get_peft_model(load_model(folder)[0], LoraConfig(r=4, target_modules="all-linear"), adapter_name="mine")
    weights = [p for name, p in model.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for weight in weights:
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    sampler = TorchSampler(model=model)
    params = {"temperature": 0, "max_tokens": 20}
    before = tokens_of(sampler.sample(rows(PROMPTS[:1]), params))
    handle = sampler.submit(rows()[0], params)
    drawn = handle.tokens()
    assert next(drawn) == before[0][0][0]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(-1)
    late = sampler.submit(rows()[0], params)
    assert [before[0][0][0], *drawn] == before[0][0]
    after = tokens_of(sampler.sample(rows(PROMPTS[:1]), params))
    assert tokens_of([late.result()]) == after != before


def test_adapters_of_a_pool_are_taken_as_they_are_now(folder, adapters):
    """A model that gives versions of its adapters, as a pool does."""
    from twinkle_transformers.engine.adapters import read_version

    target, _ = adapters
    base, _ = load_model(folder)
    sites = sites_of(base)
    install(list(sites.values()))
    versions = {name: read_version(target / name, sites) for name in ("small", "large")}

    def taken(name):
        version = versions[name]
        return SimpleNamespace(layout=version.layout, flat=version.flat, id=version.key)

    pool = SimpleNamespace(model=base, sampler_version=taken)
    sampler = TorchSampler(model=pool)
    params = {"temperature": 0, "max_tokens": 8}
    own = TorchSampler(folder)
    names = ["small", None, "large", ""]
    found = tokens_of(sampler.sample(rows(PROMPTS[:4]), params, adapter_name=names))
    for ids, name, tokens in zip(PROMPTS, names, found, strict=False):
        own.set_template("Template", model_id=str(folder))
        expected = own.sample(rows([ids]), {**params, "stop": []}, adapter_path=target / name if name else None)
        assert tokens[0][: len(expected[0].sequences[0].tokens)] == expected[0].sequences[0].tokens
    before = next(iter(base.parameters())).data_ptr()
    assert next(iter(sampler.model.parameters())).data_ptr() == before


def test_an_adapter_that_is_more_than_low_rank_terms_is_sampled_beside_the_others(folder, adapters, tmp_path):
    target, _ = adapters
    model = get_peft_model(load_model(folder)[0], LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "dora")
    params = {"temperature": 0, "max_tokens": 8}
    expected = tokens_of(TorchSampler(model=model).sample(rows(PROMPTS[:3]), params))
    sampler = sampler_of(folder)
    plain = tokens_of(sampler.sample(rows(PROMPTS[:3]), {**params, "stop": []}, adapter_path=target / "small"))
    sampler.add_adapter_to_sampler("small", target / "small")
    sampler.add_adapter_to_sampler("dora", tmp_path / "dora")
    found = tokens_of(sampler.sample(rows(PROMPTS[:3]), params, adapter_name=["dora", "small", "dora"]))
    assert found == [expected[0], plain[1], expected[2]]
    base = tokens_of(sampler.sample(rows(PROMPTS[:3]), params, use_base_model=True))
    assert base == tokens_of(TorchSampler(folder).sample(rows(PROMPTS[:3]), params))


def test_names_of_adapters_must_fit_the_inputs(folder, adapters):
    sampler = sampler_of(folder)
    with pytest.raises(ArgumentError, match="1 adapter names for 2 inputs"):
        sampler.sample(rows(PROMPTS[:2]), adapter_name=[None])
    with pytest.raises(ArgumentError, match="'smal' is unknown"):
        sampler.sample(rows(PROMPTS[:2]), adapter_name=[None, "smal"])
    with pytest.raises(ArgumentError, match="not both"):
        sampler.sample(rows(PROMPTS[:1]), adapter_name="a", adapter_path=adapters[0] / "small")


def test_an_adapter_of_broken_numbers_is_refused_and_harms_nobody(folder, adapters, tmp_path):
    from safetensors.torch import load_file, save_file

    target, _ = adapters
    (tmp_path / "bad").mkdir()
    tensors = load_file(target / "small" / "adapter_model.safetensors")
    tensors[next(iter(tensors))][0, 0] = torch.nan
    save_file(tensors, tmp_path / "bad" / "adapter_model.safetensors")
    (tmp_path / "bad" / "adapter_config.json").write_bytes((target / "small" / "adapter_config.json").read_bytes())
    sampler = sampler_of(folder)
    sampler.add_adapter_to_sampler("small", target / "small")
    sampler.add_adapter_to_sampler("bad", tmp_path / "bad")
    params = {"temperature": 0, "max_tokens": 6}
    alone = tokens_of(sampler.sample(rows(PROMPTS[:1]), params, adapter_name="small"))
    good = sampler.submit(rows()[0], params, adapter_name="small")
    with pytest.raises(NonFiniteError, match="bad"):
        sampler.submit(rows()[0], params, adapter_name="bad")
    assert tokens_of([good.result()]) == alone


# Arrival


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


def test_requests_wait_in_their_order_when_there_is_no_room(folder):
    roomy = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 20, "stop": []}
    expected = tokens_of(roomy.sample(rows(), params))
    store = roomy._service.engine._room.store
    sampler = sampler_of(folder, cache_bytes=130 * store.token_bytes, prefix_cache_bytes=0)
    handles = [sampler.submit(row, params) for row in rows()]
    finished = []
    while len(finished) < len(handles):
        until = partial(lambda known: sum(h.done for h in handles) > known, len(finished))
        sampler._service.engine.drive(until)
        assert len(sampler._service.engine._running) <= 130 // 20
        assert store.bytes <= 130 * store.token_bytes
        finished += [n for n, h in enumerate(handles) if h.done and n not in finished]
    assert [tokens_of([h.result()])[0] for h in handles] == expected


def test_what_can_never_fit_is_refused_with_how_much_and_why(folder):
    sampler = sampler_of(folder, cache_bytes=20 * 512)
    assert sampler._service.engine.longest == 20
    with pytest.raises(CapacityError, match=r"row 1: 27 tokens need 0\.0 MiB .*\(512 bytes a token\).* room for 20"):
        sampler.sample(rows(PROMPTS[:2]), {"max_tokens": 7})
    (response,) = sampler.sample(rows(PROMPTS[:1]), {"temperature": 0, "stop": []})
    assert len(response.sequences[0].tokens) == 18  # nobody said how many, so as many as fit


def test_samples_of_one_prompt_leave_room_for_others(folder):
    sampler = sampler_of(folder, max_batch_size=3)
    many = sampler.submit(rows()[0], {"max_tokens": 10, "seed": 1, "stop": []}, num_samples=30)
    next(many.tokens())
    late = sampler.submit(rows()[4], {"max_tokens": 3, "seed": 1, "stop": []})
    late.result()
    assert not many.done
    assert len(tokens_of([many.result()])[0]) == 30


# Prefixes


def test_samples_of_a_prompt_read_it_once(folder, monkeypatch):
    sampler = sampler_of(folder, prefix_cache_bytes=0)
    _ = sampler._service.engine
    steps = spy(sampler, monkeypatch)
    sampler.sample(rows([PROMPTS[3]]), {"max_tokens": 4, "seed": 1, "stop": []}, num_samples=6)
    assert steps == [[40], [1] * 6, [1] * 6, [1] * 6]


def test_a_prompt_that_begins_like_an_earlier_one_is_not_read_twice(folder, monkeypatch):
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 5, "stop": [], "logprobs": 1}
    prompt = PROMPTS[3]
    expected = sampler.sample(rows([prompt]), params)[0].sequences[0]
    steps = spy(sampler, monkeypatch)
    again = sampler.sample(rows([prompt]), params)[0].sequences[0]
    assert steps[0] == [8]  # 32 of 40 are two blocks
    assert again.tokens == expected.tokens
    assert [p[0][1] for p in again.logprobs] == pytest.approx([p[0][1] for p in expected.logprobs], abs=1e-5)
    steps.clear()
    longer = prompt + expected.tokens + [7, 8, 9, 10]
    sampler.sample(rows([longer]), params)
    assert steps[0] == [49 - 32]
    steps.clear()
    sampler.sample(rows([longer]), params)
    assert steps[0] == [1]  # whole blocks, but one token is left to read
    sampler.reset_prefix_cache()
    steps.clear()
    sampler.sample(rows([prompt]), params)
    assert steps[0] == [40]


def test_prompts_of_one_call_that_begin_alike_share_it_too(folder, monkeypatch):
    sampler = sampler_of(folder)
    steps = spy(sampler, monkeypatch)
    system = PROMPTS[3] + PROMPTS[8]
    found = tokens_of(
        sampler.sample(rows([[*system, n] for n in range(5)]), {"temperature": 0, "max_tokens": 3, "stop": []})
    )
    assert sum(map(sum, steps)) == 74 + 4 * (74 - 64) + 5 * 2
    plain = sampler_of(folder, prefix_cache_bytes=0)
    for n, tokens in enumerate(found):
        alone = plain.sample(rows([[*system, n]]), {"temperature": 0, "max_tokens": 3, "stop": []})
        assert tokens == tokens_of(alone)[0]


def test_prefixes_of_one_adapter_are_not_those_of_another(folder, adapters, monkeypatch):
    target, _ = adapters
    sampler = sampler_of(folder)
    params = {"temperature": 0, "max_tokens": 5, "stop": []}
    fresh = [
        tokens_of(sampler_of(folder).sample(rows([PROMPTS[3]]), params, adapter_path=path))
        for path in (None, target / "small", target / "other")
    ]
    steps = spy(sampler, monkeypatch)
    for _ in range(2):
        for path, expected in zip((None, target / "small", target / "other"), fresh, strict=True):
            assert tokens_of(sampler.sample(rows([PROMPTS[3]]), params, adapter_path=path)) == expected
    assert [step[0] for step in steps if step[0] > 1] == [40, 40, 40, 8, 8, 8]


def test_prompt_logprobs_are_whole_also_where_the_prompt_is_known(folder, module):
    sampler = sampler_of(folder)
    params = {"max_tokens": 2, "seed": 1, "prompt_logprobs": 2}
    sampler.sample(rows([PROMPTS[3]]), {"max_tokens": 1})
    (response,) = sampler.sample(rows([PROMPTS[3]]), params)
    expected = logprobs_by_forward(module, PROMPTS[3])
    assert response.prompt_logprobs == [None, *(pytest.approx(value, abs=1e-4) for value in expected)]
    assert len(response.topk_prompt_logprobs) == 40


def test_kept_prefixes_stay_within_their_bytes_and_the_oldest_go(folder, monkeypatch):
    sampler = sampler_of(folder, prefix_cache_bytes=5 * 16 * 512)
    params = {"max_tokens": 1, "seed": 1}
    for start in range(4):
        sampler.sample(rows([list(range(start, start + 33))]), params)
    cache = sampler._service.engine.prefixes
    assert cache.bytes == 5 * 16 * 512
    steps = spy(sampler, monkeypatch)
    for start in (3, 2, 0):
        sampler.sample(rows([list(range(start, start + 33))]), params)
    assert steps == [[1], [1], [33]]


def test_weights_that_were_written_make_prefixes_worthless(folder):
    module, _ = load_model(folder)
    sampler = TorchSampler(model=module)
    params = {"temperature": 0, "max_tokens": 6}
    sampler.sample(rows([PROMPTS[3]]), params)
    with torch.no_grad():
        module.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    found = tokens_of(sampler.sample(rows([PROMPTS[3]]), params))
    assert found == tokens_of(TorchSampler(model=module).sample(rows([PROMPTS[3]]), params))


# Ends and failures


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
    assert len(sampler._service.engine._room.places) == 1
    assert tokens_of([second.result()]) == expected[1:]
    assert not sampler._service.engine._room.places
    assert sampler._service.engine._room.store.bytes == 0
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
    assert not sampler._service.engine._room.places


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
    assert not sampler._service.engine._room.places


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
    assert not sampler._service.engine._room.places


def _some_steps(handles):
    seen = []

    def until():
        seen.append(1)
        return len(seen) > 3 or all(handle.done for handle in handles)

    return until


# Streams


def test_a_stream_gives_the_text_piece_by_piece(folder):
    sampler = sampler_of(folder)
    params = {"max_tokens": 25, "seed": 4, "temperature": 1.2}
    whole = sampler.sample(rows(PROMPTS[:1]), params)[0].sequences[0]
    pieces = list(sampler.sample_stream(rows()[0], params))
    assert "".join(text for text, _ in pieces) == whole.decoded
    assert [reason for _, reason in pieces] == [None] * (len(pieces) - 1) + [whole.stop_reason]
    assert len(pieces) > 5


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
    assert len(sampler._service.engine._room.places) == 1
    stream.close()
    assert not sampler._service.engine._room.places


def test_a_stream_takes_one_input_and_one_sample(folder):
    sampler = sampler_of(folder)
    with pytest.raises(ArgumentError, match="num_samples is 2"):
        sampler.sample_stream(rows()[0], {"num_samples": 2})
    with pytest.raises(ArgumentError, match="one input, not 2"):
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

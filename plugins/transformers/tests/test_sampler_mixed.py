"""TorchSampler as an engine: models of many kinds and adapters beside each other, each row as if it were alone."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from samplers import (
    LENGTHS,
    PROMPTS,
    adapters,  # noqa: F401 - a fixture
    assert_same_scores,
    folder,  # noqa: F401 - a fixture
    module,  # noqa: F401 - a fixture
    rows,
    sampler_of,
    tokens_of,
)
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, NonFiniteError
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.loading import load_model
from twinkle_transformers.sampling.adapters import read_version, sites_of
from twinkle_transformers.sites import install


def logprobs_by_forward(module, ids, temperature=1.0):
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ids])).logits[0].double()
    table = (logits / temperature).log_softmax(-1)
    return [table[at, token].item() for at, token in enumerate(ids[1:])]


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


@pytest.mark.sample(4)
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


def with_another_state():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.3, eos_token_id=258, pad_token_id=256, bos_token_id=257,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3_5ForCausalLM(config).eval()


@pytest.mark.full
def test_a_model_with_a_state_of_another_kind_takes_the_slower_path_and_says_so_once(caplog):
    sampler = TorchSampler(model=with_another_state())
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


@pytest.mark.full
def test_adapters_of_a_pool_on_such_a_model_are_sampled_by_the_slower_path(tmp_path):
    base = with_another_state()
    peft = get_peft_model(copy.deepcopy(base), LoraConfig(r=3, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    peft.save_pretrained(tmp_path)
    version = read_version(tmp_path, sites_of(base))
    pool = SimpleNamespace(model=base, sampler_version=lambda name: version)
    params = {"temperature": 0, "max_tokens": 6}
    found = tokens_of(TorchSampler(model=pool).sample(rows(PROMPTS[:3]), params, adapter_name=["a", None, "a"]))
    alone = [tokens_of(TorchSampler(model=model).sample(rows(PROMPTS[:3]), params)) for model in (peft, base)]
    assert found == [alone[0][0], alone[1][1], alone[0][2]]
    assert alone[0] != alone[1]


def test_a_rotary_embedding_that_depends_on_the_batch_takes_the_slower_path(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = tiny_model(tmp_path / "dynamic", "llama", rope_parameters=rope)
    assert TorchSampler(folder)._service.engine is None


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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
    target, _ = adapters
    base, _ = load_model(folder)
    sites = sites_of(base)
    install(list(sites.values()))
    versions = {name: read_version(target / name, sites) for name in ("small", "large")}

    pool = SimpleNamespace(model=base, sampler_version=versions.__getitem__)
    sampler = TorchSampler(model=pool)
    params = {"temperature": 0, "max_tokens": 8}
    own = TorchSampler(folder)
    names = ["small", None, "large", None]
    found = tokens_of(sampler.sample(rows(PROMPTS[:4]), params, adapter_name=names))
    for ids, name, tokens in zip(PROMPTS, names, found, strict=False):
        own.set_template("Template", model_id=str(folder))
        expected = own.sample(rows([ids]), {**params, "stop": []}, adapter_path=target / name if name else None)
        assert tokens[0][: len(expected[0].sequences[0].tokens)] == expected[0].sequences[0].tokens
    before = next(iter(base.parameters())).data_ptr()
    assert next(iter(sampler.model.parameters())).data_ptr() == before


@pytest.mark.full
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
    with pytest.raises(ArgumentError, match="not several"):
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


def test_rows_of_equal_length_are_bit_equal_alone_and_among_others_where_that_is_asked_for(folder):
    sampler = sampler_of(folder, batch_invariant=True, prefix_cache_bytes=0)
    prompts = torch.randint(0, 256, (10, 16), generator=torch.Generator().manual_seed(0)).tolist()
    params = {"temperature": 0, "max_tokens": 6, "logprobs": 3, "stop": []}
    together = sampler.sample(rows(prompts), params)
    for ids, response in zip(prompts, together, strict=True):
        (alone,) = sampler.sample(rows([ids]), params)
        assert_same_scores(sampler.model, ids, alone.sequences[0], response.sequences[0])

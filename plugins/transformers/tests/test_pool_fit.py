"""Models that a pool cannot carry are refused when it is made; patches and kernels keep adapters working."""

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn

from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.kernel import kernelize, unkernelize
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.patch import Patch, apply_patch, undo_patch
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.pool.compatibility import check_model_kind
from twinkle_transformers.pool.config import read_config
from twinkle_transformers.sites import find_sites, install

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROWS: list[Any] = [
    {"input_ids": [5, 6, 7, 8, 9, 3, 4, 5, 6], "labels": [6, 7, 8, 9, 3, 4, 5, 6, -100]},
    {"input_ids": [9, 8, 7], "labels": [8, 7, -100]},
]
EVERYWHERE = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def saved(tmp_path: Path, model: Any) -> str:
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMALL | changes)))


def opened(source: Any, **options: Any) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(model_id=str(source), **{"mixed_precision": "no", **options})
    model.add_adapter_to_model("a", EVERYWHERE, seed=1)
    model.set_optimizer("AdamW", adapter_name="a", lr=1e-2)
    return model


def trained(model: MultiLoraTransformersModel) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and the gradient of one step's rows, and drop the gradient."""
    output = model.forward_backward(inputs=ROWS, adapter_name="a")
    flat = model.pool.tenants["a"].flat
    gradient = flat.grad.clone()
    model.zero_grad(adapter_name="a", flush=True)
    return output["logps"], gradient


def test_an_encoder_is_refused_when_the_model_is_made(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SMALL))
    with pytest.raises(Unsupported, match=r"BertLMHeadModel cannot carry .* its tokens see those that come after them"):
        MultiLoraTransformersModel(model_id=saved(tmp_path, bert), model_cls="BertLMHeadModel", mixed_precision="no")


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    t5 = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(Unsupported, match="T5ForConditionalGeneration is an encoder-decoder model"):
        MultiLoraTransformersModel(model_id=saved(tmp_path, t5), model_cls="T5ForConditionalGeneration")


def test_a_model_without_an_output_projection_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, num_labels=1)
    scorer = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(Unsupported, match="no output projection over a vocabulary; TransformersModel trains it"):
        MultiLoraTransformersModel(
            model_id=saved(tmp_path, scorer), model_cls="LlamaForSequenceClassification", mixed_precision="no"
        )


class Int8Linear(nn.Linear):
    """A quantised layer as libraries make them: whole numbers in the place of the weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.scale = nn.Parameter(layer.weight.detach().abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((layer.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantised_layers_are_refused() -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj = Int8Linear(model.model.layers[1].mlp.up_proj)
    with pytest.raises(Unsupported, match=r"layers.1.mlp.up_proj is quantised \(Int8Linear with weights of torch.int8"):
        check_model_kind(Backbone.of(model))


def test_layers_whose_forward_was_replaced_are_refused() -> None:
    model = llama()
    layer = model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    with pytest.raises(Unsupported, match=r"the forward of model.layers.0.self_attn.q_proj was replaced"):
        install(list(find_sites(model).values()))


class OneByOne(nn.Module):
    """Experts that are linear layers, of which each token sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 32)
        chosen = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(flat[chosen == number])
        return out.view(x.shape)


def test_layers_that_see_only_some_tokens_are_let_go(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Llama(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = OneByOne()
            self.post_init()

    torch.manual_seed(0)
    source = Llama(transformers.LlamaConfig(**SMALL))
    with caplog.at_level(logging.WARNING):
        model = MultiLoraTransformersModel(
            model_cls=Llama, model_id=saved(folder.parent / "odd", source), mixed_precision="no"
        )
    assert "adapters cannot adapt model.layers.*.mlp.experts.*, which see only some tokens" in caplog.text
    model.add_adapter_to_model("a", EVERYWHERE)
    adapted = model.pool.tenants["a"].plan.layout.entries
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert trained(model)[1].any()
    with pytest.raises(Unsupported, match=r"its targets match .*experts.0, a Linear"):
        model.add_adapter_to_model("b", {"r": 2, "target_modules": ["experts.0"]})


@pytest.mark.full
def test_kernels_before_and_after_keep_the_numbers_of_adapters(folder: Path) -> None:
    plain = trained(opened(folder))
    late = opened(folder)
    kernelize(late)
    for one, other in zip(trained(late), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    unkernelize(late)
    assert all(torch.equal(one, other) for one, other in zip(trained(late), plain, strict=True))


class DoubledLogits(Patch):
    """Replaces the forward of the whole model by one that knows better."""

    def __call__(self, module: Any) -> Any:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            output.logits = output.logits * 2
            return output

        self.replace(module, "forward", forward, create=True)
        return module


class Bypass(Patch):
    """Replaces the forward of a layer, past which adapters on it would do nothing."""

    def __call__(self, module: Any) -> Any:
        layer = module.model.layers[0].self_attn.q_proj
        self.replace(layer, "forward", lambda x: nn.functional.linear(x, layer.weight) * 0.5, create=True)
        return module


@pytest.mark.full
def test_a_patch_of_the_whole_model_is_seen_by_every_adapter(folder: Path) -> None:
    model = opened(folder)
    head = next(name for name, site in model.pool.sites.items() if site.head)
    model.add_adapter_to_model("head", {"r": 2, "target_modules": [head], "init_lora_weights": False}, seed=2)
    names = ["a", "head"]
    plain = model.forward_only(inputs=ROWS, adapter_name=names, temperature=0.5)
    model.apply_patch(DoubledLogits)
    for one, other in zip(model.forward_only(inputs=ROWS, adapter_name=names), plain, strict=True):
        torch.testing.assert_close(one["logps"], other["logps"], rtol=1e-5, atol=1e-5)
    model.undo_patch(DoubledLogits)
    for one, other in zip(model.forward_only(inputs=ROWS, adapter_name=names, temperature=0.5), plain, strict=True):
        assert torch.equal(one["logps"], other["logps"])


def test_a_patch_that_would_bypass_adapters_is_refused_and_undone(folder: Path) -> None:
    model = opened(folder)
    before = trained(model)
    with pytest.raises(Unsupported, match=r"layers.0.self_attn.q_proj was replaced .*; adapters need its own"):
        model.apply_patch(Bypass)
    assert all(torch.equal(one, other) for one, other in zip(trained(model), before, strict=True))


class Running(Patch):
    """Lets the MLPs mix tokens along the row, as no segment could tell."""

    def __call__(self, module: Any) -> Any:
        for layer in module.model.layers:
            self.replace(layer.mlp, "forward", lambda x: x.cumsum(1), create=True)
        return module


@pytest.mark.full
def test_after_a_patch_that_mixes_tokens_sequences_go_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = opened(folder)
    before = trained(model)
    with caplog.at_level(logging.WARNING):
        model.apply_patch(Running)
    assert re.search(r"its sequences see each other: .* Each sequence runs through the model by itself", caplog.text)
    together = model.forward_only(inputs=ROWS, adapter_name=["a", None])
    alone = [
        model.forward_only(inputs=[row], adapter_name=[who])[0] for row, who in zip(ROWS, ["a", None], strict=True)
    ]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one["logps"], other["logps"], rtol=0, atol=1e-5)
    model.undo_patch(Running)
    assert all(torch.equal(one, other) for one, other in zip(trained(model), before, strict=True))


@pytest.mark.full
def test_a_patch_of_the_module_itself_is_seen_by_the_next_operation(folder: Path) -> None:
    model = opened(folder)
    before = trained(model)
    apply_patch(model.model, Bypass)
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"layers.0.self_attn.q_proj was replaced .*; adapters need its own"):
            trained(model)
    undo_patch(model.model, Bypass)
    assert all(torch.equal(one, other) for one, other in zip(trained(model), before, strict=True))
    apply_patch(model.model, Running)
    together = model.forward_only(inputs=ROWS, adapter_name=["a", None])
    assert {found.path: found.exact for found in model.evidence()} == dict.fromkeys(
        ("packing", "prefixes", "fused"), False
    )
    for row, who, output in zip(ROWS, ["a", None], together, strict=True):
        alone = model.forward_only(inputs=[row], adapter_name=[who])[0]
        torch.testing.assert_close(output["logps"], alone["logps"], rtol=0, atol=1e-5)
    undo_patch(model.model, Running)
    assert all(torch.equal(one, other) for one, other in zip(trained(model), before, strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", ["the model", "its module"])
@pytest.mark.parametrize("kind", [TransformersModel, MultiLoraTransformersModel])
def test_a_sampler_that_shares_the_model_follows_its_patches(folder: Path, kind: Any, by: str) -> None:
    model: Any = kind(model_id=str(folder), mixed_precision="no")

    def scores(sampler: Any) -> list[float]:
        row = {"input_ids": list(range(3, 20))}
        params = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1, "stop": []}
        [response] = sampler.sample([row], params, use_base_model=True)
        return [pairs[0][1] for pairs in response.sequences[0].logprobs]

    shared = TorchSampler(model=model)
    before = scores(shared)
    assert [str(found) for found in shared.evidence() if not found.exact] == []
    assert shared._service.runner.backbone is model.backbone, "nothing is measured twice"
    model.apply_patch(Running) if by == "the model" else apply_patch(model.model, Running)
    assert scores(shared) == pytest.approx(scores(TorchSampler(model=model.model)), rel=0, abs=1e-5)
    assert scores(shared) != pytest.approx(before, rel=0, abs=1e-2)
    [steps] = shared.evidence()
    assert "its sequences see each other" in steps.reason
    model.undo_patch(Running) if by == "the model" else undo_patch(model.model, Running)
    assert scores(shared) == before


@pytest.mark.full
def test_rows_with_images_are_refused_and_text_goes_on(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "depth": 1, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config=SMALL | {"rope_parameters": rope}, vision_config=vision, image_token_id=60, video_token_id=61,
        vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    torch.manual_seed(0)
    source = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model = opened(saved(tmp_path, source), model_cls="Qwen2_5_VLForConditionalGeneration")
    assert all(".language_model." in name for name in model.pool.tenants["a"].plan.layout.entries)
    image = {"pixel_values": torch.randn(4, 1176), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(DataError, match="rows must contain only text where adapters share a pass, got 'pixel_values'"):
        model.forward_backward(inputs=[ROWS[0] | image], adapter_name="a")
    logps, _ = trained(model)
    path = model.save("a", str(tmp_path), adapter_name="a")
    theirs = PeftModel.from_pretrained(copy.deepcopy(source), path).eval()
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([ROWS[0]["input_ids"]])).logits[0].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(ROWS[0]["labels"]).clamp(min=0)[:, None])[:-1, 0]
    torch.testing.assert_close(logps[0, :8], wanted, rtol=0, atol=1e-5)


@pytest.mark.full
def test_targets_that_lie_outside_the_text_decoder_are_refused(tmp_path: Path) -> None:
    config = transformers.Gemma3Config(
        text_config=SMALL | {"head_dim": 8},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    )
    source = transformers.Gemma3ForConditionalGeneration(config)
    model = opened(saved(tmp_path, source), model_cls="Gemma3ForConditionalGeneration")
    with pytest.raises(
        Unsupported, match=r"its targets match model.vision_tower.*only linear layers of the text decoder"
    ):
        model.add_adapter_to_model("b", {"r": 2, "target_modules": ["q_proj"]})
    with pytest.raises(Unsupported, match="embed_tokens, a Gemma3TextScaledWordEmbedding"):
        model.add_adapter_to_model("b", {"r": 2, "target_modules": ["embed_tokens"]})


def test_what_peft_refuses_on_a_model_is_left_out_or_refused_with_its_words() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8)
    model = transformers.MambaForCausalLM(config)
    sites = find_sites(model)
    plan = read_config("a", {"r": 2, "target_modules": "all-linear"}, sites, model)
    assert {name.rpartition(".")[2] for name in plan.layout.entries} == {"in_proj", "x_proj", "dt_proj"}
    with pytest.raises(ArgumentError, match=r"adapter 'a': .*'out_proj' is incompatible with Mamba"):
        read_config("a", {"r": 2, "target_modules": ["out_proj"]}, sites, model)


def test_sequences_go_alone_where_rows_share_a_long_prefix_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL))
    model = opened(saved(tmp_path, source))
    prompt = list(range(3, 33))
    rows: list[Any] = [{"input_ids": [*prompt, n], "labels": [*prompt[1:], n, -100]} for n in (40, 41)]
    together = model.forward_only(inputs=rows, adapter_name=["a", "a"])
    for row, output in zip(rows, together, strict=True):
        alone = model.forward_only(inputs=[row], adapter_name=["a"])[0]
        torch.testing.assert_close(output["logps"], alone["logps"], rtol=0, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("off", ["fused", "prefixes", "packing", "all"])
def test_a_pool_computes_the_same_without_fast_paths(folder: Path, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    def logps() -> list[torch.Tensor]:
        nonlocal paths
        model = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no", dtype="float64")
        for number, name in enumerate("ab"):
            model.add_adapter_to_model(name, {"r": 4, "init_lora_weights": False}, seed=number)
        prompt = list(range(3, 15))
        rows = [
            {"input_ids": ids, "labels": [*ids[1:], -100]} for ids in ([*prompt, 20, 21], [*prompt, 30], [*prompt, 40])
        ]
        paths = {found.path: found.exact for found in model.evidence()}
        return [row for name in "ab" for row in model.forward_only(inputs=rows, adapter_name=name)["logps"]]

    paths: dict[str, bool] = {}
    fast = logps()
    assert paths == dict.fromkeys(("packing", "prefixes", "fused"), True)
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", off)
    slow = logps()
    assert {name for name, on in paths.items() if not on} == {
        "fused": {"fused"}, "prefixes": {"prefixes"}, "packing": {"packing", "prefixes", "fused"},
        "all": {"packing", "prefixes", "fused"},
    }[off]  # fmt: skip
    for ours, plain in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)  # weights of adapters are float32, their sums too

"""`TransformersModel` and `TorchSampler` built as published scripts build them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from twinkle.data_format import LossOutput, SamplingParams
from twinkle.errors import ArgumentError, ComponentTypeError, TrainingStateError, Unsupported
from twinkle.model import TransformersModel
from twinkle.platform import Platform
from twinkle.processor import InputProcessor
from twinkle.sampler import BaseSamplerEngine, TorchSampler, TorchSamplerEngine
from twinkle.testing import tiny_config, tiny_model

ROWS = [
    {"input_ids": [5, 9, 7], "labels": [9, 7, -100]},
    {"input_ids": [4, 3, 2, 8], "labels": [3, 2, 8, -100]},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_model_of_a_configuration_has_random_weights_and_the_tokenizer_of_an_id(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = TransformersModel(config=tiny_config(), tokenizer_id=str(tiny), mixed_precision="no")
    torch.manual_seed(5)
    same = TransformersModel(config=tiny_config(), mixed_precision="no")
    for (name, one), other in zip(model.get_state_dict().items(), same.get_state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert (model.model_path, model.base["fingerprint"], model.tokenizer_path) == (None, None, tiny)
    talk = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}]
    out = model.forward_backward(inputs=talk)
    assert out["loss"] > 1
    assert model.clip_grad_norm() > 0
    model.step()
    saved = Path(str(model.save("last", output_dir=str(tmp_path))))
    assert (saved / "tokenizer.json").is_file()
    again = TransformersModel(model_id=str(saved), mixed_precision="no")
    expected = model.forward_only(inputs=ROWS)["logps"]
    torch.testing.assert_close(again.forward_only(inputs=ROWS)["logps"], expected)
    with pytest.raises(TrainingStateError, match="tokenizer_id"):
        same.forward_only(inputs=talk)
    with pytest.raises(ArgumentError, match="model_id"):
        TransformersModel()


def test_the_adapter_of_random_weights_is_saved_without_a_base(tmp_path: Path) -> None:
    model = TransformersModel(config=tiny_config(), mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=2, target_modules="all-linear"))
    folder = Path(str(model.save("adapter", output_dir=str(tmp_path))))
    assert (folder / "adapter_model.safetensors").is_file()


def test_a_published_result_of_a_loss_trains(tiny: Path) -> None:
    def total(inputs: Any, outputs: Any) -> LossOutput:
        trained = inputs["labels"] != -100
        return LossOutput(loss=-outputs["logps"][trained].sum(), num_tokens=trained.sum())

    def mean(inputs: Any, outputs: Any) -> LossOutput:
        return LossOutput(loss=-outputs["logps"][inputs["labels"] != -100].mean(), num_tokens=0)

    model = TransformersModel(model_id=str(tiny), mixed_precision="no")
    expected = model.forward_backward(inputs=ROWS)["loss"]
    for loss in (total, mean):
        model.set_loss(loss)
        assert model.forward_backward(inputs=ROWS)["loss"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ComponentTypeError, match="a mean of micro-batches"):
        model.forward_backward(inputs=ROWS, micro_batch_size=1)


def test_float_masks_of_ones_are_masks() -> None:
    rows = [
        {**row, "attention_mask": torch.ones(len(row["input_ids"])), "completion_mask": [1.0] * len(row["input_ids"])}
        for row in ROWS
    ]
    batch = InputProcessor()(rows)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["attention_mask"].dtype == batch["completion_mask"].dtype == torch.int64
    with pytest.raises(ValueError, match="whole numbers"):
        InputProcessor()([{**ROWS[0], "attention_mask": [1.0, 0.5, 1.0]}])


def test_a_sampler_reads_the_engines_options(tiny: Path) -> None:
    args = {
        "max_num_seqs": 3, "dtype": "float32", "max_model_len": 12, "enable_prefix_caching": False, "enable_lora": True,
        "max_lora_rank": 32, "gpu_memory_utilization": 0.7, "tensor_parallel_size": 1, "enforce_eager": True,
    }  # fmt: skip
    sampler = TorchSampler(str(tiny), engine_args=args)
    assert sampler.max_batch_size == 3
    params = SamplingParams(max_tokens=50, stop=[], seed=1)
    response = sampler.sample({"input_ids": [5, 9, 7, 8]}, params, return_encoded=True)[0]
    assert len(response.sequences[0].tokens) == 8
    assert response.sequences[0].new_input_feature is not None
    plain = TorchSampler(str(tiny), max_batch_size=3, dtype="float32")
    assert plain.sample({"input_ids": [5, 9, 7, 8]}, params)[0].sequences[0].tokens[:8] == response.sequences[0].tokens
    bare = TorchSampler(model=sampler.model)
    with pytest.raises(TrainingStateError, match="set_template"):
        bare.sample({"input_ids": [5]}, params, return_encoded=True)
    for wrong, error, text in (
        ({"max_num_seq": 3}, ArgumentError, "nearest: 'max_num_seqs'"),
        ({"tensor_parallel_size": 2}, Unsupported, "tensor_parallel_size"),
        ({"enable_lora": "yes"}, ValueError, "True or False"),
        ({"max_model_len": 0}, ValueError, "above 0"),
        ([], ArgumentError, "a dict"),
    ):
        with pytest.raises(error, match=text):
            TorchSampler(str(tiny), engine_args=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="max_batch_size is 4, and engine_args says 3"):
        TorchSampler(str(tiny), engine_args=args, max_batch_size=4)


def test_an_engine_serves_concurrent_callers(tiny: Path) -> None:
    sampler = TorchSampler(str(tiny), dtype="float32")
    engine: BaseSamplerEngine = TorchSamplerEngine(sampler)
    prompts = [[5, 9, 7], [4, 3], [8, 8, 1, 2]]

    async def all_of_them() -> list[Any]:
        calls = [
            engine.sample(ids, {"max_tokens": 4, "seed": 7, "stop": []}, num_samples=2, include_prompt_logprobs=True)
            for ids in prompts
        ]
        return await asyncio.gather(*calls)

    for ids, response in zip(prompts, asyncio.run(all_of_them()), strict=True):
        params = SamplingParams(max_tokens=4, seed=7, stop=[], num_samples=2, logprobs=1, prompt_logprobs=1)
        expected = sampler.sample({"input_ids": ids}, params)[0]
        assert [s.tokens for s in response.sequences] == [s.tokens for s in expected.sequences]
        assert len(response.prompt_logprobs or []) == len(ids)
        assert all(len(s.logprobs or []) == 4 for s in response.sequences)
    assert asyncio.run(engine.get_tokenizer()).eos_token == "<|im_end|>"
    with pytest.raises(Unsupported, match="images"):
        asyncio.run(engine.sample([1], {}, images=["picture"]))
    with pytest.raises(Unsupported, match="has no sleep"):
        asyncio.run(engine.sleep())


def test_options_of_from_pretrained_are_met_or_refused_with_the_remedy(tiny: Path) -> None:
    model = TransformersModel(
        model_id=str(tiny), torch_dtype=torch.float32, low_cpu_mem_usage=True, cache_dir=None,
        device_map=Platform.get_local_device(), local_files_only=True, ignore_mismatched_sizes=False,
        revision=None, token=None,
    )  # fmt: skip
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}
    sampler = TorchSampler(str(tiny), torch_dtype="bfloat16", revision=None, low_cpu_mem_usage=True)
    assert next(sampler._source.module.parameters()).dtype == torch.bfloat16
    for option, value, remedy in (
        ("device_map", "auto", "device_mesh"),
        ("cache_dir", "models", "HF_HOME"),
        ("ignore_mismatched_sizes", True, "num_labels"),
    ):
        with pytest.raises(ArgumentError, match=f"{option}=.*{remedy}"):
            TransformersModel(model_id=str(tiny), **{option: value})
    with pytest.raises(ArgumentError, match="HF_HUB_OFFLINE=1"):
        TransformersModel(model_id="hf://owner/name", local_files_only=True)
    with pytest.raises(ArgumentError, match="two names of one argument"):
        TransformersModel(model_id=str(tiny), dtype="float32", torch_dtype="bfloat16")


def test_an_optimizer_group_has_its_published_fields(tiny: Path) -> None:
    model = TransformersModel(model_id=str(tiny), mixed_precision="fp16")
    group = model.optimizer_group[""]
    assert (group.scaler is group.loss_scale, group.scaler_has_nan) == (True, False)
    assert group.scaler is not None
    assert TransformersModel(model_id=str(tiny), mixed_precision="no").optimizer_group[""].scaler is None

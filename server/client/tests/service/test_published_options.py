"""Published forms of options: what a script may name, and with which arguments, is the same as for a local model."""

import numpy as np
import pytest
import server_sdk as sdk
from native_rows import rows
from serving import Served

from twinkle.server.common import input_feature_to_datum
from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler
from twinkle_client.errors import OperationFailed, RequestRefused

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def test_what_can_be_named_is_listed(client: TwinkleClient, model: MultiLoraTransformersModel) -> None:
    offered = client.get_server_capabilities().components
    assert {"InfonceLoss", "GKDLoss", "DPOLoss", "cross_entropy"} <= set(offered["loss"])
    assert "MSELoss" not in offered["loss"]
    for loss in offered["loss"]:
        model.set_loss(loss)
    assert "SelfCognitionProcessor" in offered["preprocessor"]
    assert "GSM8KAccuracyReward" in offered["reward"]
    assert "Dataset" in offered["dataset"]
    assert {"filter", "template", "processor", "dataloader", "metric", "optimizer"} <= offered.keys()
    assert {"EmbeddingMetric", "GKDMetric"} <= set(offered["metric"])


def test_a_checkpoint_for_training_is_sampled_like_one_for_sampling(
    model: MultiLoraTransformersModel, client: TwinkleClient
) -> None:
    model.forward_backward(rows(1, 6, 9))
    model.clip_grad_and_step()
    saved = [model.save("s", is_sampler=True), model.save("w"), model.save("o", save_optimizer=True)]
    sampler = vLLMSampler(model_id="tiny", client=client)
    sampler.set_template("Template", model_id="tiny")
    answers = [
        sampler.sample(
            inputs=[CHAT], sampling_params={"max_tokens": 4, "seed": 1, "logprobs": 1},
            adapter_uri=one.twinkle_path,
        )[0].sequences[0]
        for one in saved
    ]  # fmt: skip
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens
    assert answers[0].logprobs == answers[1].logprobs == answers[2].logprobs
    with pytest.raises(RequestRefused, match="external weights are files to download"):
        sampler.sample({"input_ids": [5]}, adapter_uri=saved[1].twinkle_path.replace("weights", "external_weights"))


@pytest.mark.parametrize("loss", ["GKDLoss", "twinkle-losses/GKDLoss"])
def test_a_loss_cannot_be_asked_to_take_all_memory(model: MultiLoraTransformersModel, loss: str) -> None:
    with pytest.raises(OperationFailed, match="chunk_size must be at most 2048 on a service, got 4096"):
        model.set_loss(loss, chunk_size=4096)


def test_distillation_is_a_loss_of_tinker_requests_too(model: MultiLoraTransformersModel, service: Served) -> None:
    batch = rows(1, 6, 9)
    top = model.forward_only(batch, topk_logprobs=4, disable_lora=True, temperature=0.5)
    model.set_loss("GKDLoss", beta=0.0)
    expected = model.forward_backward(
        batch, teacher_topk_logprobs=top["topk_logprobs"], teacher_topk_indices=top["topk_indices"]
    )
    with sdk.opened(service.url) as client:
        training = sdk.trainer(client, "tiny", 4)
        data = []
        for place, row in enumerate(batch):
            length = len(row["input_ids"])
            labels = np.array(row["labels"])
            inputs = {
                "target_tokens": np.where(labels == -100, 0, labels),
                "weights": (labels != -100).astype(np.float32),
                "teacher_topk_logprobs": top["topk_logprobs"][place, :length].astype(np.float32),
                "teacher_topk_indices": top["topk_indices"][place, :length].astype(np.int64),
            }
            tensors = {name: sdk.tinker.TensorData.from_numpy(array) for name, array in inputs.items()}
            data.append(sdk.tinker.Datum(model_input=sdk.prompt(row["input_ids"]), loss_fn_inputs=tensors))
        with pytest.raises(sdk.tinker.RequestFailedError, match="chunk_size must be at most 2048 on a service"):
            training.forward_backward(data, "GKDLoss", {"chunk_size": 4096}).result(60)
        found = training.forward_backward(data, "GKDLoss", {"beta": 0.0}).result(60)
    assert found.metrics["loss:sum"] == pytest.approx(expected["loss"] * expected["num_tokens"], rel=1e-4)
    assert found.metrics["kl:sum"] == pytest.approx(found.metrics["loss:sum"], rel=1e-5)
    for output, logps, row in zip(found.loss_fn_outputs, expected["logps"], batch, strict=True):
        own = np.array(output["logprobs"].data)
        np.testing.assert_allclose(own, logps[: len(row["input_ids"])], atol=1e-4)


def test_preferences_in_the_published_form_of_tinker_requests(service: Served) -> None:
    """The reference is a forward with `disable_lora`, and `importance_sampling` on `ref_logps` is DPO."""
    pairs = rows(3, 9, 6, 8, 7)
    with sdk.opened(service.url) as client:
        training = sdk.trainer(client, "tiny", 4, seed=1)
        data = [input_feature_to_datum(row) for row in pairs]
        base = training.forward(data, "cross_entropy").result(60)
        training.forward_backward(data, "cross_entropy").result(60)
        training.optim_step(sdk.tinker.AdamParams(learning_rate=1e-2)).result(60)
        reference = training.forward(data, "cross_entropy", loss_fn_config={"disable_lora": True}).result(60)
        trained = training.forward(data, "cross_entropy", {"disable_lora": False}).result(60)
        assert reference.metrics == base.metrics != trained.metrics
        with pytest.raises(sdk.tinker.RequestFailedError, match="disable_lora is for forward"):
            training.forward_backward(data, "cross_entropy", {"disable_lora": True}).result(60)
        with pytest.raises(sdk.tinker.RequestFailedError, match=r"disable_lora must be True or False, got 2\.0"):
            training.forward(data, "cross_entropy", {"disable_lora": 2}).result(60)
        for datum, output in zip(data, reference.loss_fn_outputs, strict=True):
            logps = np.array(output["logprobs"].tolist(), dtype=np.float32)
            datum.loss_fn_inputs["ref_logps"] = sdk.tinker.TensorData.from_numpy(logps)
        config = {"dpo_beta": 0.2, "dpo_sft_weight": 0.5, "dpo_loss_type": "hinge"}
        found = training.forward(data, "importance_sampling", config).result(60)
        own = {name.removeprefix("dpo_"): value for name, value in config.items()}
        expected = training.forward(data, "DPOLoss", own).result(60)
        assert found.metrics == expected.metrics
        assert {"loss:sum", "rewards/margins:sum", "nll:sum"} <= found.metrics.keys()
        assert training.forward(data, "cross_entropy").result(60).metrics == trained.metrics
        training.forward_backward(data, "importance_sampling", {"dpo_beta": 0.2}).result(60)
        assert training.optim_step(sdk.tinker.AdamParams()).result(60).metrics["grad_norm"] > 0
        with pytest.raises(sdk.tinker.RequestFailedError, match="dpo_betta"):
            training.forward(data, "importance_sampling", {"dpo_betta": 0.2}).result(60)


def test_options_of_an_adapter_survive_checkpoints(client: TwinkleClient) -> None:
    model = MultiLoraTransformersModel("ms://tiny", client=client)
    config = {
        "r": 4, "lora_alpha": 16, "target_modules": r".*self_attn\.(q|v)_proj", "exclude_modules": r".*\.0\..*q_proj",
        "use_rslora": True, "init_lora_weights": False, "bias": "none",
    }  # fmt: skip
    model.add_adapter_to_model("a", config, seed=1)
    model.set_optimizer("AdamW", lr=1e-2)
    model.forward_backward(rows(1, 6, 9))
    model.clip_grad_and_step()
    expected = model.forward_only(rows(2, 8))["logps"]
    saved = [model.save("w"), model.save("o", save_optimizer=True)]
    for number, path in enumerate(saved):
        model.add_adapter_to_model(f"b{number}", checkpoint=path, load_optimizer=bool(number))
        np.testing.assert_array_equal(model.forward_only(rows(2, 8))["logps"], expected)
    sampler = vLLMSampler(client=client)
    saved.append(model.save("s", is_sampler=True, adapter_name="a"))
    prompt = {"input_ids": rows(2, 8)[0]["input_ids"]}
    for path in saved:
        [answer] = sampler.sample(prompt, {"max_tokens": 1, "prompt_logprobs": 1}, adapter_uri=path)
        row = {"input_ids": prompt["input_ids"], "labels": [*prompt["input_ids"][1:], -100]}
        found = model.forward_only([row], adapter_name="a")["logps"][0]
        np.testing.assert_allclose(answer.prompt_logprobs[1:], found[:-1], atol=1e-4)
    with pytest.raises(RequestRefused, match="at most two repetitions"):
        model.add_adapter_to_model("c", {"target_modules": "(?!.*visual).*q_proj"})
    with pytest.raises(OperationFailed, match="not both"):
        model.add_adapter_to_model("c", {"exclude_modules": ["q_proj"], "train_mlp": True})

"""Losses of the client's own on sets of tokens: log-probabilities `[T, K]`, values and gradients against PEFT alone."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_sdk as sdk
import torch
from peft import LoraConfig, get_peft_model
from serving import Served
from transformers import AutoModelForCausalLM

from twinkle.errors import ArgumentError
from twinkle_client import MultiLoraTransformersModel, TwinkleClient
from twinkle_client.errors import OperationFailed

CONFIG = {
    "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 5},
    "alpha_pattern": {"q_proj": 3.0},
}  # fmt: skip
K = 4


def rows(*lengths: int) -> list[dict[str, Any]]:
    """Return rows with K tokens at each position; some positions and some places have none."""
    draw = np.random.default_rng(sum(lengths))
    made = []
    for length in lengths:
        labels = draw.integers(1, 256, (length, K))
        labels[0] = -100
        labels[2, 1:] = -100
        made.append({"input_ids": draw.integers(1, 256, length).tolist(), "labels": labels})
    return made


def kl_to(targets: Sequence[torch.Tensor]) -> Any:
    """Return a loss that is not linear in the log-probabilities and sees all of a set at once."""

    def loss(_rows: Any, logps: Sequence[torch.Tensor]) -> Any:
        total = torch.zeros(())
        for wanted, own in zip(targets, logps, strict=True):
            there = own != 0
            total = total + (wanted * (wanted.log() - own) * there).sum()
            total = total + 0.1 * (own * there).exp().sum(-1).log1p().square().sum()
        return total, {"positions": float(sum(len(own) for own in logps))}

    return loss


def targets_of(batch: Sequence[Any]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.rand((len(row["input_ids"]), K), generator=draw).softmax(-1) for row in batch]


class Reference:
    """The adapter in PEFT's model, with torch's own gradients."""

    def __init__(self, base: Path, config: dict[str, Any], weights: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied weights
            model = get_peft_model(
                AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**config)
            )
        self.model = model.eval()
        self.trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
        assert self.trained.keys() == dict(weights).keys()
        for name, value in weights.items():
            self.trained[name].data.copy_(torch.as_tensor(np.array(value)))

    def logps(self, row: Any) -> torch.Tensor:
        labels = torch.as_tensor(np.array(row["labels"]))
        scores = self.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        return scores.gather(-1, labels.clamp(min=0)) * (labels != -100)

    def gradients(self, loss: Any, batch: Sequence[Any]) -> tuple[float, dict[str, torch.Tensor]]:
        value = loss(batch, [self.logps(row) for row in batch])[0]
        found = torch.autograd.grad(value, list(self.trained.values()))
        return float(value.detach()), dict(zip(self.trained, found, strict=True))


def compare(before: Any, after: Any, gradients: dict[str, torch.Tensor], rate: float, eps: float = np.inf) -> None:
    """Compare the change of all weights with a step along the gradient; Adam's shrinks those that are not below eps."""
    assert max(float(value.abs().max()) for value in gradients.values()) > 1e-2
    for name, value in gradients.items():
        moved = (np.asarray(before[name], np.float64) - np.asarray(after[name], np.float64)) / rate
        expected = (value / (1 + value.abs() / eps)).numpy()
        np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.fixture
def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    made = MultiLoraTransformersModel(client=client)
    made.add_adapter_to_model("a", CONFIG, seed=3)
    made.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    return made


def test_a_loss_of_the_client_sees_sets_of_tokens_and_trains_as_in_torch(
    model: MultiLoraTransformersModel, base: Path
) -> None:
    batch = rows(7, 12)
    loss = kl_to(targets_of(batch))
    model.set_processor("InputProcessor", padding_side="left")
    model.forward_backward_custom(batch, loss)
    model.clip_grad_and_step(1e9)  # B is no longer 0
    before = model.get_state_dict()
    reference = Reference(base, CONFIG, before)
    output = model.forward_backward_custom(inputs=batch, loss_fn=loss, denominator=4.0)
    value, gradients = reference.gradients(loss, batch)
    assert [array.shape for array in output["logps"]] == [(7, K), (12, K)]
    for row, found in zip(batch, output["logps"], strict=True):
        np.testing.assert_allclose(found, reference.logps(row).detach().numpy(), atol=2e-5)
    assert output["loss"] == pytest.approx(value / 4, rel=1e-5)
    assert (output["num_tokens"], output["metrics"]) == (4.0, {"positions": 19.0})
    assert model.clip_grad_and_step(1e9) > 0
    compare(before, model.get_state_dict(), gradients, 0.25)


def test_what_is_no_loss_of_the_client_is_refused_before_anything_is_trained(model: MultiLoraTransformersModel) -> None:
    batch = rows(5)
    for loss, words in (
        (lambda _rows, logps: logps[0], r"must be a scalar tensor .* got shape \[5, 4\]"),
        (lambda _rows, logps: 3.0, "got a float"),
        (lambda _rows, logps: logps[0].detach().sum(), "without gradient"),
        (lambda _rows, logps: logps[0].log().sum(), "must be finite"),
    ):
        with pytest.raises(ArgumentError, match=words):
            model.forward_backward_custom(batch, loss)
    for row, words in (({"messages": []}, "row 0 must be encoded"), ({"input_ids": [1]}, "input_ids and labels")):
        with pytest.raises(ArgumentError, match=words):
            model.forward_backward_custom([row], kl_to([]))
    with pytest.raises(ArgumentError, match="has no rows"):
        model.forward_backward_custom([], kl_to([]))
    with pytest.raises(OperationFailed, match="row 0: given_loss requires labels, and as loss_scale the gradient"):
        model.run(model._call(None, "forward_backward", {"inputs": batch, "given_loss": {"value": 1.0}}))
    progress = model.run(model._call(None, "get_progress", {}))
    assert progress["cur_step"] == 0


@pytest.mark.full
def test_other_calls_wait_until_both_passes_have_ended(model: MultiLoraTransformersModel) -> None:
    batch = rows(5)

    def loss(given: Any, logps: Any) -> Any:
        with pytest.raises(ArgumentError, match="forward_backward_custom of this adapter has not ended"):
            model.clip_grad_and_step()
        with pytest.raises(ArgumentError, match="has not ended"):
            model.forward_backward_custom(batch, kl_to(targets_of(batch)))
        return logps[0].sum()

    model.forward_backward_custom(batch, loss)
    model.clip_grad_and_step(1e9)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_the_sdk_sees_sets_of_tokens_and_trains_as_in_torch(service: Served, base: Path, client: TwinkleClient) -> None:
    tokens = [[5, 9, 2, 7, 11], [3, 1, 4]]
    draw = np.random.default_rng(0)
    sets = [draw.integers(1, 256, (len(row), K)) for row in tokens]
    batch = [{"input_ids": row, "labels": labels} for row, labels in zip(tokens, sets, strict=True)]
    loss = kl_to(targets_of(batch))
    data = [
        sdk.tinker.Datum(
            model_input=sdk.prompt(row), loss_fn_inputs={"target_tokens": sdk.tinker.TensorData.from_numpy(labels)}
        )
        for row, labels in zip(tokens, sets, strict=True)
    ]
    adam = sdk.tinker.AdamParams(learning_rate=1e3, beta1=0.0, beta2=0.0, eps=1e3)  # a step along the gradient
    kept = MultiLoraTransformersModel(client=client)
    states = []
    with sdk.opened(service.url) as opened:
        patterns = {"twinkle.rank_pattern": '{"(q_proj|v_proj)": 2}', "twinkle.alpha_pattern": '{"v_proj": 4}'}
        training = sdk.trainer(opened, "tiny", rank=4, seed=1, train_unembed=False, user_metadata=patterns)
        for step in range(2):
            training.forward_backward_custom(data, loss).result(60)
            training.optim_step(adam).result(60)
            path = training.save_state(f"step-{step}").result(60).path
            kept.add_adapter_to_model(f"step-{step}", checkpoint=path)
            states.append(kept.get_state_dict())
        seen = training.forward_backward_custom(data, loss).result(60)
        weights = training.save_state("again").result(60).path
        resumed = opened.create_training_client_from_state_with_optimizer(weights).result(60)
        assert sdk.logprobs(resumed, [1, 2, 3]) == sdk.logprobs(training, [1, 2, 3])
    first, second = states
    config = {
        "r": 4, "lora_alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"(q_proj|v_proj)": 2}, "alpha_pattern": {"v_proj": 4},
    }  # fmt: skip
    _, gradients = Reference(base, config, first).gradients(loss, batch)
    compare(first, second, gradients, 1.0, eps=1e3)
    value, _ = Reference(base, config, second).gradients(loss, batch)
    assert seen.metrics["loss:sum"] == pytest.approx(value, rel=1e-5)
    assert seen.loss_fn_outputs[0]["logprobs"].shape == [5, K]


def test_the_models_own_most_probable_tokens_are_a_set_for_a_loss(
    model: MultiLoraTransformersModel, base: Path
) -> None:
    row = {"input_ids": [5, 9, 2, 7, 11], "labels": [9, 2, 7, 11, -100]}
    top = model.forward_only(inputs=[row], topk_logprobs=K, disable_lora=True)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1).topk(K)
    np.testing.assert_array_equal(top["topk_indices"][0][:4], expected.indices[:4].numpy())
    np.testing.assert_allclose(top["topk_logprobs"][0][:4], expected.values[:4].numpy(), atol=2e-5)
    labels = np.array(top["topk_indices"][0])
    labels[4] = -100
    output = model.forward_backward_custom([{**row, "labels": labels}], lambda _rows, logps: -logps[0].sum())
    np.testing.assert_allclose(output["logps"][0][:4], expected.values[:4].numpy(), atol=2e-5)  # B is 0

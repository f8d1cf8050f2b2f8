"""One script, run on a local model and through the client: the numbers are the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_rows import CONFIG, rows
from peft import LoraConfig

from twinkle_client import MultiLoraTransformersModel, TwinkleClient

Script = Callable[[Any], list[Any]]


def numbers(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, np.float64)


def supervised(model: Any) -> list[Any]:
    """Accumulation over two backward calls, a scheduler, and the default metrics."""
    model.add_adapter_to_model("a", CONFIG, gradient_accumulation_steps=2, seed=7)
    model.set_optimizer("AdamW", lr=1e-2, weight_decay=0.1, adapter_name="a")
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=4, adapter_name="a")
    seen: list[Any] = []
    for step in range(6):
        output = model.forward_backward(inputs=rows(step, 12, 7, 9), adapter_name="a", micro_batch_size=2)
        seen += [output["loss"], output["logps"], output["num_tokens"]]
        model.clip_grad_and_step(adapter_name="a")
        if step % 2:
            metrics = model.calculate_metric(is_training=True, adapter_name="a")
            seen += [metrics[name] for name in ("loss", "grad_norm", "accuracy", "learning rate", "iters")]
    model.forward_backward(inputs=rows(9, 5), adapter_name="a")
    model.clip_grad_and_step(adapter_name="a", flush=True)
    model.forward_only(inputs=rows(50, 8, 8), adapter_name="a")
    seen.append(model.calculate_loss(adapter_name="a"))
    seen += [model.calculate_metric(is_training=False, adapter_name="a")["loss"]]
    return [*seen, *model.get_state_dict(adapter_name="a").values()]


def single_calls(model: Any) -> list[Any]:
    """Every call on its own: forward, loss, backward, clipping, step, clearing, schedule."""
    model.add_adapter_to_model("a", CONFIG, seed=3)
    model.set_loss("CrossEntropyLoss", adapter_name="a")
    model.set_optimizer("SGD", lr=0.1, momentum=0.9, adapter_name="a")
    model.set_lr_scheduler("StepLR", step_size=1, gamma=0.5, adapter_name="a")
    model.set_processor("InputProcessor", padding_side="left", adapter_name="a")
    seen: list[Any] = []
    for step in range(3):
        seen.append(model.forward(inputs=rows(step, 6, 11), adapter_name="a")["logps"])
        seen.append(model.calculate_loss(adapter_name="a"))
        model.backward(adapter_name="a")
        seen.append(model.clip_grad_norm(0.5, adapter_name="a"))
        model.step(adapter_name="a")
        model.zero_grad(adapter_name="a")
        model.lr_step(adapter_name="a")
        seen.append(model.calculate_metric(is_training=True, adapter_name="a")["learning rate"])
    return [*seen, *model.get_state_dict(adapter_name="a").values()]


def noisy(model: Any) -> list[Any]:
    """NEFTune's noise on one adapter of two, in passes that share a prompt."""
    model.add_adapter_to_model("a", CONFIG, seed=7)
    model.add_adapter_to_model("b", CONFIG, seed=8)
    model.apply_patch("NEFTunePatch", noise_alpha=30.0, adapter_name="a")
    seen: list[Any] = []
    for step in range(2):
        for name in ("a", "b"):
            batch = [rows(9, 6)[0], *rows(step, 12, 7), rows(9, 6)[0]]
            output = model.forward_backward(inputs=batch, adapter_name=name, micro_batch_size=3)
            seen += [output["loss"], output["logps"]]
            model.clip_grad_and_step(adapter_name=name)
    seen.append(model.forward_only(inputs=rows(50, 8, 8), adapter_name="a")["logps"])
    return seen


def preferences(model: Any) -> list[Any]:
    """DPO whose reference is the same model without the adapter."""
    model.add_adapter_to_model("a", CONFIG | {"lora_dropout": 0.0}, seed=5)
    model.set_loss("DPOLoss", beta=0.3, adapter_name="a")
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
    model.add_metric("DPOMetric", beta=0.3, is_training=True, adapter_name="a")
    seen: list[Any] = []
    for step in range(3):
        pairs = rows(step, 9, 6, 8, 8)
        reference = model.forward_only(inputs=pairs, disable_lora=True, adapter_name="a")
        output = model.forward_backward(inputs=pairs, ref_outputs={"logps": reference["logps"]}, adapter_name="a")
        model.clip_grad_and_step(adapter_name="a")
        metrics = model.calculate_metric(is_training=True, adapter_name="a")
        seen += [reference["logps"], output["loss"], metrics["rewards/margins"], metrics["rewards/accuracies"]]
    return seen


def policy(model: Any) -> list[Any]:
    """GRPO with ragged log-probabilities of a sampler, and one advantage a row."""
    model.add_adapter_to_model("a", CONFIG, seed=5)
    model.set_loss("GRPOLoss", epsilon=0.2, beta=0.04, adapter_name="a")
    model.set_optimizer("Adam", lr=1e-2, adapter_name="a")
    model.add_metric("GRPOMetric", is_training=True, adapter_name="a")
    draw = np.random.default_rng(0)
    seen: list[Any] = []
    for step in range(3):
        batch = rows(step, 9, 6, 8, 8)
        old = [draw.normal(-5.0, 0.5, sum(label != -100 for label in row["labels"])).tolist() for row in batch]
        reference = model.forward_only(inputs=batch, disable_lora=True, adapter_name="a")
        output = model.forward_backward(
            inputs=batch, old_logps=old, advantages=[1.0, -1.0, 0.5, -0.5], ref_logps=reference["logps"],
            temperature=0.8, adapter_name="a",
        )  # fmt: skip
        model.clip_grad_and_step(1.0, adapter_name="a")
        metrics = model.calculate_metric(is_training=True, adapter_name="a")
        seen += [output["loss"], metrics["train/approx_kl"], metrics["train/clip_ratio"], metrics["grad_norm"]]
    return seen


def embeddings(model: Any) -> list[Any]:
    """InfoNCE: a row has one label, which is 1 where a group of anchor, positive and negative begins.

    Published scripts write the label as a list of one.
    """
    model.add_adapter_to_model("a", CONFIG | {"lora_dropout": 0.0}, seed=5)
    model.set_loss("InfonceLoss", temperature=0.1, hard_negatives=1, adapter_name="a")
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
    model.add_metric("EmbeddingMetric", is_training=True, adapter_name="a")
    seen: list[Any] = []
    for step in range(3):
        batch = [
            {"input_ids": row["input_ids"], "labels": [int(place % 3 == 0)] if step else int(place % 3 == 0)}
            for place, row in enumerate(rows(step, 9, 6, 8, 8, 7, 5))
        ]
        seen.append(model.forward_only(inputs=batch, task="embedding", adapter_name="a")["embeddings"])
        seen.append(model.forward_backward(inputs=batch, task="embedding", adapter_name="a")["loss"])
        model.clip_grad_and_step(adapter_name="a")
        metrics = model.calculate_metric(is_training=True, adapter_name="a")
        seen += [metrics[name] for name in ("loss", "pos_sim", "neg_sim")]
    return seen


def distillation(model: Any) -> list[Any]:
    """GKD: the teacher is the base model, as its most probable tokens, in arrays and in lists, or as whole logits."""
    model.add_adapter_to_model("a", CONFIG | {"lora_dropout": 0.0}, seed=5)
    model.set_optimizer("AdamW", lr=3e-2, adapter_name="a")
    model.forward_backward(inputs=rows(8, 9), adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")  # the student differs from its teacher
    model.calculate_metric(is_training=True, adapter_name="a")
    model.set_loss("GKDLoss", beta=0.3, temperature=1.0, adapter_name="a")
    model.add_metric("GKDMetric", is_training=True, adapter_name="a")
    seen: list[Any] = []
    for step, lists in enumerate((False, True)):
        batch = rows(step, 9, 6, 8)
        top = model.forward_only(inputs=batch, topk_logprobs=5, disable_lora=True, adapter_name="a")
        known = {f"teacher_{name}": top[name] for name in ("topk_logprobs", "topk_indices")}
        if lists:
            known = {
                name: [table[: len(row["input_ids"])] for table, row in zip(value.tolist(), batch, strict=True)]
                for name, value in known.items()
            }
        seen.append(model.forward_backward(inputs=batch, adapter_name="a", **known)["loss"])
        model.clip_grad_and_step(adapter_name="a")
        metrics = model.calculate_metric(is_training=True, adapter_name="a")
        seen += [metrics[name] for name in ("loss", "kl", "reverse_kl", "teacher_agreement", "teacher_mass")]
    logits = model.forward_only(inputs=batch, return_logits=True, disable_lora=True, adapter_name="a")["logits"]
    seen.append(model.forward_backward(inputs=batch, teacher_logits=logits, adapter_name="a")["loss"])
    model.clip_grad_and_step(adapter_name="a")
    return [*seen, model.calculate_metric(is_training=True, adapter_name="a")["grad_norm"]]


def layer_patterns(model: Any) -> list[Any]:
    """Ranks and scales of single layers, from PEFT's own configuration."""
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1,
        rank_pattern={"v_proj": 2, r".*\.1\.mlp\.down_proj": 6, ".*_proj": 5}, alpha_pattern={"q_proj": 3},
    )  # fmt: skip
    model.add_adapter_to_model("a", config, seed=7)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
    seen: list[Any] = []
    for step in range(2):
        seen.append(model.forward_backward(inputs=rows(step, 12, 7), adapter_name="a")["loss"])
        model.clip_grad_and_step(adapter_name="a")
    return [*seen, *model.get_state_dict(adapter_name="a").values()]


def adapter_options(model: Any) -> list[Any]:
    """Options of PEFT's configuration, as its object, as a mapping of all its fields, and as a mapping of some."""
    pattern = LoraConfig(
        r=4, lora_alpha=16, target_modules=r".*\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)$", use_rslora=True,
        exclude_modules=["layers.0.mlp.down_proj"], init_lora_weights="gaussian", task_type="CAUSAL_LM",
    )  # fmt: skip
    some = {
        "r": 2, "target_modules": "all-linear", "exclude_modules": r".*mlp.*", "bias": "none", "task_type": "CAUSAL_LM",
        "use_rslora": True,
    }  # fmt: skip
    seen: list[Any] = []
    for name, config in (("a", pattern), ("b", pattern.to_dict()), ("c", some)):
        model.add_adapter_to_model(name, config, seed=7)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
        for step in range(2):
            seen.append(model.forward_backward(inputs=rows(step, 12, 7), adapter_name=name)["loss"])
            model.clip_grad_and_step(adapter_name=name)
        weights = model.get_state_dict(adapter_name=name)
        assert not any("layers.0.mlp.down_proj" in key for key in weights)
        seen += weights.values()
    return seen


SCRIPTS = [
    supervised,
    policy,
    *(
        pytest.param(script, marks=pytest.mark.full)
        for script in (single_calls, noisy, preferences, embeddings, distillation, layer_patterns, adapter_options)
    ),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_gives_the_same_numbers_on_a_service(script: Script, client: TwinkleClient, local: Any) -> None:
    here = script(local)
    there = script(MultiLoraTransformersModel(client=client))
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(numbers(other), numbers(one), rtol=1e-6, atol=1e-6)

"""From rows to an adapter in plain Python, every part by name: what the distributions promise together."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.hub import local_model
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model

REAL = "builtin://smollm2-135m-instruct"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def self_cognition(model_id: Any, rows: int) -> Dataset:
    dataset = Dataset(DatasetMeta("builtin://self-cognition", data_slice=range(rows)))
    dataset.map("SelfCognitionProcessor", init_args={"model_name": "Glow", "model_author": "the founders"})
    dataset.set_template("Template", model_id=str(model_id), max_length=512)
    dataset.encode()
    return dataset


def trained_text(row: Any, tokenizer: Any) -> str:
    assert row["labels"][-1] == -100
    return str(tokenizer.decode([label for label in row["labels"] if label != -100]))


def answers_with_end(row: Any, end: str) -> str:
    return "".join(m["content"] + end for m in row["messages"] if m["role"] == "assistant")


def test_labels_of_an_encoded_data_set_are_exactly_the_assistant_turns(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    dataset = self_cognition(tiny, 144)
    assert len(dataset) == 144
    for index in range(len(dataset)):
        row = dataset[index]
        assert trained_text(row, tokenizer) == answers_with_end(row, "<|im_end|>")


def test_a_loop_learns_evaluates_saves_and_samples_what_it_learned(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    loader = DataLoader(self_cognition(tiny, 16), batch_size=8, shuffle=True, seed=1)
    model = TransformersModel(model_id=str(tiny), mixed_precision="no")
    model.add_adapter_to_model("default", peft.LoraConfig(r=8, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=10 * len(loader))
    losses = []
    for _ in range(10):
        for batch in loader:
            model.forward_backward(inputs=batch, micro_batch_size=4)
            model.clip_grad_and_step()
            losses.append(model.calculate_metric(is_training=True)["loss"])
    assert losses[-1] < losses[0] - 0.2

    for batch in loader:
        model.forward_only(inputs=batch)
        model.calculate_loss()
    assert model.calculate_metric(is_training=False)["loss"] < losses[0]

    saved = model.save("adapter", str(tmp_path))
    sampler = TorchSampler(model=model)
    prompt: Any = {"messages": [{"role": "user", "content": "Who are you?"}]}
    sequence = sampler.sample([prompt], SamplingParams(max_tokens=12, temperature=0, logprobs=1))[0].sequences[0]
    assert sequence.new_input_feature is not None
    assert sequence.logprobs is not None

    # the trainer scores the sampled row as the sampler did, and PEFT alone continues the prompt alike
    scored = model.forward_only(inputs=[sequence.new_input_feature])["logps"][0]
    ours = [entry[0][1] for entry in sequence.logprobs]
    assert scored[scored != 0].tolist() == pytest.approx(ours, abs=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    alone = peft.PeftModel.from_pretrained(plain, str(saved)).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    encoded = tokenizer.apply_chat_template(
        prompt["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        wanted = alone.generate(**encoded, max_new_tokens=12, do_sample=False)[0, encoded["input_ids"].shape[1] :]
    assert sequence.tokens == wanted.tolist()


@pytest.mark.full
@pytest.mark.model
def test_the_real_small_model_is_encoded_sampled_and_scored_alike() -> None:
    folder = local_model(REAL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dataset = self_cognition(REAL, 20)
    for index in range(len(dataset)):
        row = dataset[index]
        assert trained_text(row, tokenizer) == answers_with_end(row, "<|im_end|>")

    model = TransformersModel(model_id=REAL, mixed_precision="no")
    sampler = TorchSampler(model=model)
    question: Any = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    response = sampler.sample([question], SamplingParams(max_tokens=12, temperature=0, logprobs=1))[0]
    sequence = response.sequences[0]
    assert sequence.decoded == "The capital of France is Paris."
    assert sequence.stop_reason == "stop"
    scored = model.forward_only(inputs=[sequence.new_input_feature])["logps"][0]
    assert sequence.logprobs is not None
    assert scored[scored != 0].tolist() == pytest.approx([e[0][1] for e in sequence.logprobs], abs=1e-4)
    prompt = torch.tensor([response.prompt_token_ids])
    with torch.no_grad():
        whole = model.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
    assert sequence.tokens == whole[0, prompt.shape[1] :].tolist()

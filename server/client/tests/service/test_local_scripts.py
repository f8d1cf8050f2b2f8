"""What local and published scripts do with rows, components and results also works on a service."""

from pathlib import Path

import pytest
from native_rows import CONFIG, rows

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward
from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler
from twinkle_transformers.sampler import TorchSampler as LocalSampler


@pytest.fixture
def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    made = MultiLoraTransformersModel("ms://tiny", client=client)
    made.add_adapter_to_model("a", CONFIG, seed=1)
    made.set_optimizer("AdamW", lr=1e-2)
    return made


def test_sampled_rows_keep_what_rewards_read(client: TwinkleClient, base: Path) -> None:
    """The loop of the published GRPO script: batch, sample, `new_input_feature`, reward."""
    data = Dataset(DatasetMeta(data=[{"question": f"{n}+1?", "answer": f"so\n#### {n + 1}"} for n in range(2)]))
    data.set_template("Template", model_id=str(base), max_length=512)
    data.map("GSM8KProcessor")
    raw = [{**data[0], "extra": None}]
    data.encode(add_generation_prompt=True)
    remote, local = vLLMSampler("tiny", client=client), LocalSampler(model_id=str(base))
    for sampler in (remote, local):
        sampler.set_template("Template")
    params = {"max_tokens": 4, "num_samples": 2, "temperature": 0.0}
    for batch in (next(iter(DataLoader(dataset=data, batch_size=2))), raw):
        found = [
            [sequence.new_input_feature for answer in sampler.sample(batch, params) for sequence in answer.sequences]
            for sampler in (remote, local)
        ]
        assert [set(row) for row in found[0]] == [set(row) for row in found[1]]
        for name in ("messages", "user_data", "input_ids", "labels"):
            assert [row[name] for row in found[0]] == [row[name] for row in found[1]], name
        assert found[0][0]["messages"][-1]["role"] == "assistant"
        assert GSM8KAccuracyReward()(found[0]) == [0.0] * len(found[0])


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_collated_batch_trains_as_its_rows(model: MultiLoraTransformersModel, side: str) -> None:
    given = rows(1, 6, 9, 4)
    model.set_processor("InputProcessor", padding_side=side)
    expected = model.forward_only(given)["logps"]
    assert model.forward_only(InputProcessor(padding_side=side)(given))["logps"] == pytest.approx(expected, abs=1e-6)

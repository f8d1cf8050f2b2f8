"""What local and published scripts do with rows, components and results also works on a service."""

from pathlib import Path

import pytest
from native_rows import CONFIG, rows

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward
from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler
from twinkle_client.errors import Gone
from twinkle_transformers.sampler import TorchSampler as LocalSampler


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


def test_a_checkpoint_that_was_saved_again_is_sampled_as_it_is_now(model: MultiLoraTransformersModel) -> None:
    """The published GRPO script saves each step under one name; a sampler must not go on with the first weights."""
    sampler = vLLMSampler("tiny", client=model.client)
    prompt, score = [{"input_ids": [5, 6, 7, 8]}], {"max_tokens": 0, "prompt_logprobs": 1}
    seen, sessions = [], []
    for _ in range(3):
        path = model.save("weights-of-the-policy", is_sampler=True).twinkle_path
        [answer] = sampler.sample(prompt, score, adapter_uri=path)
        sessions.append(sampler._samplers[path][1])
        logps = model.forward_only([{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}])["logps"][0, :3]
        assert answer.prompt_logprobs[1:] == pytest.approx(logps, abs=1e-4)
        seen.append(answer.prompt_logprobs)
        model.forward_backward(rows(1, 6, 9))
        model.clip_grad_and_step()
    assert seen[0] != seen[1] != seen[2]
    body = {"inputs": prompt, "options": score, "seq_id": 9}
    for session in sessions[:2]:  # the service need not keep their weights
        with pytest.raises(Gone, match=f"sampling session '{session}' has ended"):
            model.client.run(model.client.connection.request("POST", f"/samplers/{session}/sample", body))


def test_a_sampling_session_that_runs_is_ended_when_it_is_idle(model: MultiLoraTransformersModel) -> None:
    sampler = vLLMSampler("tiny", client=model.client)
    prompt, path = [{"input_ids": [5, 6, 7, 8]}], model.save("policy", is_sampler=True).twinkle_path
    stream = sampler.sample_stream(prompt, {"max_tokens": 40, "temperature": 0.0}, adapter_uri=path)
    first = next(stream)
    old = sampler._samplers[path][1]
    for number in range(2):
        model.save("policy", is_sampler=True)
        sampler.sample(prompt, {"max_tokens": 1}, adapter_uri=path)
        assert (old in sampler._replaced) == (number == 0)
        if number == 0:
            assert sum(len(delta.tokens) for delta in (first, *stream)) == 40


def test_the_published_loop_of_reinforcement_learning_runs_in_http_mode(client: TwinkleClient) -> None:
    """`map` with an object, `engine_args`, a sync of weights before each step, `reset_prefix_cache`, a reward."""
    from twinkle.checkpoint_engine import CheckpointEngineManager
    from twinkle.model import TransformersModel
    from twinkle.preprocessor import GSM8KProcessor
    from twinkle.sampler import TorchSampler

    twinkle.initialize("http", client=client)
    try:
        data = Dataset(DatasetMeta(data=[{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(4)]))
        data.set_template("Template", model_id="tiny", max_length=512)
        data.map(GSM8KProcessor(system="Be brief."))
        data.encode(add_generation_prompt=True)
        policy = TransformersModel(model_id="tiny", remote_group="model")
        policy.add_adapter_to_model("default", CONFIG | {"lora_dropout": 0.0}, seed=1)
        policy.set_optimizer("AdamW", lr=1e-2)
        policy.set_loss("GRPOLoss", epsilon=0.2)
        policy.set_processor(InputProcessor)
        sampler = TorchSampler(model_id="tiny", engine_args={"gpu_memory_utilization": 0.8}, remote_group="sampler")
        sampler.set_template("Template", model_id="tiny")
        manager = CheckpointEngineManager(model=policy, sampler=sampler)
        for batch in DataLoader(dataset=data, batch_size=2):
            manager.sync_weights(merge_and_sync=False)
            sampler.reset_prefix_cache()
            answers = sampler.sample(batch, {"max_tokens": 4, "num_samples": 2, "logprobs": 1, "seed": 1})
            sampled = [sequence for answer in answers for sequence in answer.sequences]
            inputs = [sequence.new_input_feature for sequence in sampled]
            assert inputs[0]["messages"][0] == {"role": "system", "content": "Be brief."}
            assert GSM8KAccuracyReward()(inputs) == [0.0] * 4
            old = [[one[0][1] for one in sequence.logprobs] for sequence in sampled]
            output = policy.forward_backward(inputs=inputs, old_logps=old, advantages=[1.0, -1.0] * 2)
            logps = [row[row != 0] for row in output["logps"]]
            for present, before in zip(logps, old, strict=True):
                assert present == pytest.approx(before, abs=1e-4), "the sampler has the weights of this step"
            policy.clip_grad_and_step()
        one, score = [{"input_ids": [5, 6, 7, 8]}], {"max_tokens": 0, "prompt_logprobs": 1}
        tuned, plain = sampler.sample(one, score), sampler.sample(one, score, use_base_model=True)
        assert tuned[0].prompt_logprobs != plain[0].prompt_logprobs
        with pytest.raises(ArgumentError, match="exclude each other"):
            sampler.sample(one, score, adapter_uri="twinkle://r/weights/x", use_base_model=True)
        with pytest.raises(ArgumentError, match="the sampler must be one of http"):
            policy.sync_sampler(object())
        with pytest.raises(ArgumentError, match="engine_args must be a mapping or None, got a int"):
            TorchSampler(model_id="tiny", engine_args=3)
    finally:
        twinkle.initialize("local")

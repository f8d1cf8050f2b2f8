"""Published forms of options: what a script may name, and with which arguments, is the same as for a local model."""

import pytest
from native_rows import CONFIG, rows

from twinkle_client import MultiLoraTransformersModel, TwinkleClient, vLLMSampler
from twinkle_client.errors import RequestRefused

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    made = MultiLoraTransformersModel("ms://tiny", client=client)
    made.add_adapter_to_model("a", CONFIG, seed=1)
    made.set_optimizer("AdamW", lr=1e-2)
    return made


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

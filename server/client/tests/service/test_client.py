"""The client on a running service: adapters, sampling, checkpoints, errors, lost answers."""

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from native_rows import CONFIG, rows
from serving import Served

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, HubError, TrainingStateError
from twinkle_client import (
    Connection,
    MultiLoraTransformersModel,
    TorchSampler,
    TwinkleClient,
    current_client,
    init_twinkle_client,
    vLLMSampler,
)
from twinkle_client.errors import Gone, NotFound, OperationFailed, RequestRefused

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]}


def weights(model: Any, name: str | None = None) -> bytes:
    state = model.get_state_dict(adapter_name=name).result
    return b"".join(state[key].tobytes() for key in sorted(state))


def test_results_are_values_and_have_result(model: MultiLoraTransformersModel) -> None:
    output = model.forward_backward(rows(1, 6, 9))
    assert output["loss"] == output.result["loss"]
    norm = model.clip_grad_norm()
    assert norm == norm.result > 0
    assert model.step().result is None
    model.zero_grad()
    metrics = model.calculate_metric(is_training=True)
    assert float(metrics["loss"]) == float(metrics.result["loss"]) == pytest.approx(output["loss"])
    text = model.get_train_configs()
    assert text == text.result
    assert "tiny (" in text
    assert "/" not in text.splitlines()[0].replace("tiny (", "")
    assert "model-" not in text
    assert text.model_dump() == {"result": text}
    assert json.loads(output.model_dump_json())["result"]["logps"] == output["logps"].tolist()


@pytest.mark.full
def test_adapters_of_one_object_are_independent(model: MultiLoraTransformersModel) -> None:
    model.add_adapter_to_model("b", CONFIG | {"r": 2}, seed=2)
    before = weights(model, "a")
    model.forward_backward(rows(1, 6), adapter_name="b")
    model.clip_grad_and_step()
    assert weights(model, "a") == before
    model.remove_adapter("b")
    assert model.adapter_name == "a"
    with pytest.raises(ArgumentError, match="there is no adapter 'b'"):
        model.forward_backward(rows(1, 6), adapter_name="b")


@pytest.mark.full
def test_conversations_are_encoded_by_the_template_of_the_model(model: MultiLoraTransformersModel, local: Any) -> None:
    model.set_template("Template", max_length=64, truncation_strategy="right")
    output = model.forward_only([CHAT, CHAT])
    local.add_adapter_to_model("a", CONFIG, seed=1)
    local.set_template("Template", max_length=64, truncation_strategy="right", adapter_name="a")
    expected = local.forward_only(inputs=[CHAT, CHAT], adapter_name="a")
    np.testing.assert_allclose(output["logps"], expected["logps"].numpy(), atol=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.backward(), TrainingStateError, "there is no forward"),
        (lambda m: m.clip_grad_and_step(), TrainingStateError, "no accumulated gradients"),
        (lambda m: m.forward_backward([{"input_ids": [10**6]}]), OperationFailed, "tokens between 0 and"),
        (lambda m: m.forward_backward([{"input_ids": [1], "pixel_values": [1.0]}]), OperationFailed, "only text"),
        (lambda m: m.forward_backward(rows(1, 5), advantage=[1]), OperationFailed, "advantage"),
        (lambda m: m.forward_only(rows(1, 5), topk=3), ArgumentError, "no argument 'topk'"),
        (lambda m: m.set_loss(print), ArgumentError, "give the name of a component"),
        (lambda m: m.save("x", foo=1), ArgumentError, r"Model\.save: unknown argument 'foo'"),
        (lambda m: m.load("x", load_optimiser=True), ArgumentError, r"load_optimizer.*signature is load\("),
        (lambda m: m.clip_grad_and_step(max_norm=1), ArgumentError, "unknown argument 'max_norm'"),
        (lambda m: m.upload_to_hub("x", "hf://a/b", privat=True), ArgumentError, "nearest: 'private'"),
        (lambda m: m.add_adapter_to_model("z", CONFIG, save_dir=3), ArgumentError, "save_dir must be a path or None"),
        (lambda m: m.set_loss("GRPO"), OperationFailed, "unknown loss_fn 'GRPO'"),
        (lambda m: m.apply_patch("Qwen3ChatTemplate"), OperationFailed, "is not marked as safe"),
        (lambda m: m.save("x", output_dir="/tmp"), ArgumentError, "a service decides where it saves"),
        (lambda m: m.save("../x"), OperationFailed, "a checkpoint name must be"),
        (lambda m: m.load("/etc/passwd"), OperationFailed, "a checkpoint name must be"),
        (lambda m: m.load("twinkle://x/weights/y"), OperationFailed, "does not exist"),
        (lambda m: m.add_adapter_to_model("a", CONFIG), ArgumentError, "already exists"),
        (lambda m: m.add_adapter_to_model("z", {"r": 4, "use_dora": True}), RequestRefused, "use_dora"),
        (lambda m: m.add_adapter_to_model("z", {"target_modules": ["nope"]}), OperationFailed, "matches no layer"),
    ],
)
def test_errors_say_what_is_wrong_and_the_model_goes_on(
    model: MultiLoraTransformersModel, call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(model)
    assert model.forward_backward(rows(1, 6, 9))["loss"] > 0


def test_checkpoints(model: MultiLoraTransformersModel, client: TwinkleClient) -> None:
    model.forward_backward(rows(1, 6, 9))
    model.clip_grad_and_step()
    saved = model.save("first", save_optimizer=True, consumed_train_samples=7)
    run = model.training_run_id()
    assert saved.twinkle_path == str(saved) == f"twinkle://{run}/weights/first"
    kept = weights(model)
    expected = model.forward_backward(rows(2, 8))["loss"]
    model.clip_grad_and_step()
    after = weights(model)
    assert model.resume_from_checkpoint(saved).result == {
        "cur_step": 1, "consumed_train_samples": 7, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    assert weights(model) == kept
    assert model.forward_backward(rows(2, 8))["loss"] == expected
    model.clip_grad_and_step()
    assert weights(model) == after
    model.load("first")
    assert weights(model) == kept
    assert model.save().twinkle_path.endswith("/checkpoint-step-2")
    assert model.save(interval=5) is None
    other = MultiLoraTransformersModel(client=client)
    other.add_adapter_to_model("b", checkpoint=saved.twinkle_path.replace("twinkle://", "tinker://"))
    assert weights(other) == kept

    assert {entry.checkpoint_id for entry in client.list_checkpoints(run)} == {
        "weights/first", "weights/checkpoint-step-2",
    }  # fmt: skip
    assert client.get_latest_checkpoint_path(run) == f"twinkle://{run}/weights/checkpoint-step-2"
    assert client.get_checkpoint_twinkle_path(run, "weights/first") == saved.twinkle_path
    info = client.get_weights_info(saved.twinkle_path)
    assert (info.training_run_id, info.base_model, info.lora_rank) == (run, "tiny", 4)
    assert client.get_training_run(run).last_checkpoint.checkpoint_id == "weights/checkpoint-step-2"
    assert run in [found.training_run_id for found in client.list_training_runs(limit=3)]
    client.delete_checkpoint(run, "weights/first")
    with pytest.raises(NotFound):
        client.get_weights_info(saved.twinkle_path)
    assert client.get_capacity_info().used_loras >= 2
    capabilities = client.get_server_capabilities()
    assert capabilities.supported_models[0].model_name == "tiny"
    assert "AdamW" in capabilities.components["optimizer"]
    assert capabilities.components["patch"] == ["NEFTunePatch"]


@pytest.mark.full
def test_sampling(model: MultiLoraTransformersModel, client: TwinkleClient) -> None:
    sampler = vLLMSampler("tiny", client=client)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    prompts = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    base = sampler.sample(prompts, greedy, num_samples=2)
    assert [len(one.sequences) for one in base] == [2, 2]
    assert base[0].sequences[0].tokens == base[0].sequences[1].tokens
    for _ in range(3):
        model.forward_backward(rows(1, 6, 9))
        model.clip_grad_and_step()
    saved = model.save("sampler", is_sampler=True)
    tuned = sampler.sample(prompts, greedy, adapter_uri=saved.twinkle_path)[0].sequences[0]
    row = {"input_ids": [5, 6, 7, *tuned.tokens], "labels": [-100, -100, *tuned.tokens, -100]}
    logps = model.forward_only([row])["logps"][0]
    np.testing.assert_allclose([pair[0][1] for pair in tuned.logprobs], logps[2:-1], atol=1e-4)
    assert tuned.new_input_feature["input_ids"] == [5, 6, 7, *tuned.tokens]
    chat = TorchSampler(client=client)
    chat.set_template("Template")
    [answer] = chat.sample({"messages": CHAT["messages"][:1]}, {"max_tokens": 3, "seed": 4, "prompt_logprobs": 1})
    assert isinstance(answer.sequences[0].decoded, str)
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    with pytest.raises(RequestRefused, match="repetition_penalti"):
        sampler.sample(prompts, {"repetition_penalti": 1.1})
    with pytest.raises(ArgumentError, match="adapter_uri="):
        sampler.sample(prompts, adapter_name="a")


@pytest.mark.full
def test_asynchronous_calls_run_in_the_order_in_which_they_begin(model: MultiLoraTransformersModel) -> None:
    async def train() -> list[Any]:
        calls = []
        for step in range(3):
            calls += [model.forward_backward_async(rows(step, 6)), model.clip_grad_and_step_async()]
        return await asyncio.gather(*calls)

    done = asyncio.run(train())
    model.add_adapter_to_model("b", CONFIG, seed=1)
    model.set_optimizer("AdamW", lr=1e-2)
    for step in range(3):
        assert model.forward_backward(rows(step, 6))["loss"] == done[2 * step]["loss"]
        assert model.clip_grad_and_step() == done[2 * step + 1]


@pytest.mark.full
def test_several_clients_in_one_process(service: Served) -> None:
    first = init_twinkle_client(service.url, session_metadata={"who": "first"})
    second = init_twinkle_client(service.url)
    assert current_client() is second
    one = MultiLoraTransformersModel(client=first)
    two = MultiLoraTransformersModel()
    for model in (one, two):
        model.add_adapter_to_model("default", CONFIG, seed=1)
    assert one.training_run_id() != two.training_run_id()
    second.close()
    assert current_client() is first
    with pytest.raises(Gone):
        MultiLoraTransformersModel(client=second).add_adapter_to_model("late", CONFIG)
    first.close()
    first.close()
    with pytest.raises(TrainingStateError, match="call init_twinkle_client"):
        current_client()


class Flaky(httpx.HTTPTransport):
    """Loses the answer of every other request that the service has carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = self.count = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.count += 1
        if self.count % 2 and b"heartbeat" not in request.url.raw_path:
            response.read()
            self.lost += 1
            raise httpx.ReadError("the answer was lost")
        return response


def test_a_call_whose_answer_was_lost_trains_once(
    service: Served, model: MultiLoraTransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle_client.http._FIRST_PAUSE", 0.01)
    transport = Flaky()
    with TwinkleClient(connection=Connection(service.url, transport=transport)) as client:
        other = MultiLoraTransformersModel(client=client)
        other.add_adapter_to_model("a", CONFIG, seed=1)
        other.set_optimizer("AdamW", lr=1e-2)
        for step in range(3):
            assert other.forward_backward(rows(step, 6))["loss"] == model.forward_backward(rows(step, 6))["loss"]
            assert other.clip_grad_and_step() == model.clip_grad_and_step()
        assert weights(other) == weights(model)
    assert transport.lost > 8


@pytest.mark.full
def test_a_call_made_again_after_its_connection_failed_trains_once(
    service: Served, model: MultiLoraTransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection(service.url)
    lose = {"at": ""}
    perform = connection._perform

    def losing(effect: Any) -> Any:
        answer = perform(effect)
        if lose["at"] and lose["at"] in getattr(effect, "path", ""):
            raise ConnectionError("lost")
        return answer

    monkeypatch.setattr(connection, "_perform", losing)
    with TwinkleClient(connection=connection) as client:
        other = MultiLoraTransformersModel(client=client)
        other.add_adapter_to_model("a", CONFIG, seed=1)
        other.set_optimizer("AdamW", lr=1e-2)
        connection._retry_seconds = 0.0
        for lost, call in (
            ("forward_backward", lambda m: m.forward_backward(rows(1, 6))),
            ("step", lambda m: m.clip_grad_and_step()),
        ):
            lose["at"] = lost
            with pytest.raises(ConnectionError):
                call(other)
            lose["at"] = ""
            assert call(other) == call(model) if lost == "step" else call(other)["loss"] == call(model)["loss"]
        assert weights(other) == weights(model)
        lose["at"] = "forward_backward"
        with pytest.raises(ConnectionError):
            other.forward_backward(rows(2, 6))
        lose["at"] = ""
        other.clip_grad_and_step()  # another call: the lost one had arrived, and was carried out
        model.forward_backward(rows(2, 6))
        model.clip_grad_and_step()
        assert weights(other) == weights(model)


def test_the_import_brings_no_heavy_package(tmp_path: Path) -> None:
    heavy = ("torch", "numpy", "transformers", "httpx", "pydantic", "fastapi", "tinker")
    code = (
        "import sys, twinkle_client\n"
        "from twinkle_client import init_twinkle_client, MultiLoraTransformersModel, vLLMSampler\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "[]\n"


def test_rewards_are_recorded_with_sampled_rows_unless_the_session_declines(
    model: MultiLoraTransformersModel, service: Served
) -> None:
    batch = rows(1, 6, 9)
    old = [[-1.0] * sum(label != -100 for label in row["labels"]) for row in batch]

    def train(model: MultiLoraTransformersModel, **more: Any) -> str:
        model.set_loss("GRPOLoss")
        model.forward_backward(batch, old_logps=old, advantages=[1.0, -1.0], **more)
        model.clip_grad_and_step()
        return model.training_run_id()

    with TwinkleClient(service.url, record_rollouts=False) as quiet:
        silent = MultiLoraTransformersModel(client=quiet)
        silent.add_adapter_to_model("a", CONFIG, seed=1)
        declined = train(silent, rewards=[1.0, 0.0])
    with pytest.raises(OperationFailed, match="rewards must be one finite number for each of 2 rows"):
        train(model, rewards=[1.0])
    run = train(model, rewards=np.array([0.25, 0.5]))
    found: dict[str, list[Any]] = {}
    for _ in range(100):  # rows are written within a second
        with contextlib.closing(sqlite3.connect(f"file:{service.data}/twinkle.db?mode=ro", uri=True)) as database:
            for name, about in database.execute("SELECT run, about FROM rollouts"):
                found.setdefault(name, []).append(json.loads(about)["reward"])
            figures = [row[0] for row in database.execute("SELECT data FROM figures WHERE run = ?", (run,))]
        if run in found:
            break
        time.sleep(0.1)
    assert found[run][-2:] == [0.25, 0.5]
    assert declined not in found
    assert any("reward" in data for data in figures)


def test_tokens_arrive_while_they_are_sampled(client: TwinkleClient, service: Served) -> None:
    sampler = vLLMSampler(client=client)
    params = {"max_tokens": 40, "seed": 11, "logprobs": 2, "stop": []}
    prompts = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    whole = sampler.sample(prompts, params, num_samples=2)
    deltas = list(sampler.sample_stream(prompts, params, num_samples=2))
    assert len(deltas) > 4 * 10, "every sequence came in many pieces"
    for place, response in enumerate(whole):
        for sample, sequence in enumerate(response.sequences):
            own = [delta for delta in deltas if (delta.input, delta.sample) == (place, sample)]
            assert [token for delta in own for token in delta.tokens] == sequence.tokens
            assert "".join(delta.text for delta in own) == sequence.decoded
            assert [delta.stop_reason for delta in own] == [None] * (len(own) - 1) + [sequence.stop_reason]
            found = [pair for delta in own for pair in delta.logprobs or ()]
            for one, other in zip(found, sequence.logprobs or (), strict=True):
                assert [token for token, _ in one] == [token for token, _ in other]
                np.testing.assert_allclose([value for _, value in one], [value for _, value in other], atol=1e-5)

    stream = sampler.sample_stream(prompts[0], {"max_tokens": 500, "stop": []})
    assert next(stream).tokens
    stream.close()

    async def first() -> list[int]:
        stream = sampler.sample_stream_async(prompts[0], {"max_tokens": 500, "stop": []})
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            tokens: list[int] = (await anext(stream)).tokens
        await client.connection.close_async()
        return tokens

    assert asyncio.run(first())
    for _ in range(100):  # what nobody reads is cancelled
        with httpx.Client(trust_env=False) as http:
            running = http.get(f"{service.url}/twinkle/status", headers={"x-api-key": "tml-local"}).json()["streams"]
        if not running:
            break
        time.sleep(0.05)
    assert not running
    with pytest.raises(RequestRefused, match="scores of the prompt"):
        next(sampler.sample_stream(prompts[0], {"prompt_logprobs": 1}))
    with pytest.raises(RequestRefused, match="tokens between 0 and"):
        next(sampler.sample_stream({"input_ids": [10**6]}))


def test_a_saved_checkpoint_is_uploaded_where_asked(
    model: MultiLoraTransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(HubError, match="give hub_token="):
        model.save("pushed", push_to_hub="hf://tester/pushed")
    with pytest.raises(ArgumentError, match="no effect without push_to_hub"):
        model.save("pushed", hub_token="t")
    assert not model.client.list_checkpoints(model.training_run_id())
    saved = model.save("pushed", push_to_hub="hf://tester/pushed", hub_token="hf_none")
    assert saved.upload_id
    state = model.upload_status(saved.upload_id)
    assert (state["checkpoint_path"], state["private"]) == (saved.twinkle_path, True)
    assert state["status"] in ("queued", "running", "failed")  # this machine has no hub

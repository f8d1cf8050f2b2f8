"""Lines 21 to 29: how models begin."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_sdk as sdk
from safetensors.numpy import load_file
from server_raw import Raw, row
from server_reference import Reference, export
from serving import Served

TOKENS = list(range(3, 23))


def test_lines_21_22_a_model_is_created_once_under_its_number(raw: Raw) -> None:
    session = raw.session()
    body = raw.create_body(session)
    requests = {raw.post("/create_model", body)["request_id"] for _ in range(3)}
    assert len(requests) == 1
    found = raw.result(requests.pop())
    assert (found["model_id"], found["type"]) == (f"{session}:train:0", "create_model")
    assert raw.model(session, 1).id == f"{session}:train:1"
    assert raw.get(f"/sessions/{session}")["training_run_ids"] == [f"{session}:train:0", f"{session}:train:1"]


def test_line_23_an_unknown_model_is_named_at_once(served: Served) -> None:
    start = time.monotonic()
    with sdk.opened(served.url) as client, pytest.raises(Exception, match="no/such-model"):
        sdk.trainer(client, "no/such-model")
    assert time.monotonic() - start < 20, "the SDK tried again and again"


PARTS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head", "embed_tokens", "unembed"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("left_out", PARTS)
def test_line_24_what_is_not_to_be_trained_has_no_parameter(raw: Raw, tmp_path: Path, left_out: str) -> None:
    model = raw.model(lora={"rank": 4, left_out: False})
    files = export(model, "a", tmp_path)
    names = load_file(files / "adapter_model.safetensors").keys()
    for flag, parts in PARTS.items():
        assert any(part in name for part in parts for name in names) == (flag != left_out), flag
    info = raw.post("/weights_info", {"tinker_path": model.save("b")})
    assert {flag: info[flag] for flag in PARTS} == {flag: flag != left_out for flag in PARTS}


def test_line_24_rank_is_honoured_and_the_scale_is_32_over_rank(raw: Raw, tmp_path: Path) -> None:
    import json

    files = export(raw.model(lora={"rank": 4}), "a", tmp_path)
    config = json.loads((files / "adapter_config.json").read_text("utf-8"))
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    weights = load_file(files / "adapter_model.safetensors")
    assert {value.shape[0] for name, value in weights.items() if "lora_A" in name} == {4}


@pytest.mark.full
def test_line_25_a_seed_gives_the_same_adapter_bit_for_bit(raw: Raw, tmp_path: Path) -> None:
    weights = [
        load_file(export(raw.model(lora={"seed": seed}), f"m{at}", tmp_path) / "adapter_model.safetensors")
        for at, seed in enumerate((7, 7, 8))
    ]
    same, other = weights[0].keys(), weights[2]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in same)
    assert any(not np.array_equal(weights[0][name], other[name]) for name in same)
    assert np.array_equal(raw.model(lora={"seed": 7}).logprobs(TOKENS), raw.model(lora={"seed": 7}).logprobs(TOKENS))


def test_line_26_a_fresh_model_says_what_the_base_model_says(raw: Raw, tiny: Path) -> None:
    model = raw.model()
    np.testing.assert_allclose(model.logprobs(TOKENS), Reference(tiny).scores(TOKENS).numpy(), atol=2e-5)
    np.testing.assert_allclose(raw.sampler().scores(TOKENS)[1:], model.logprobs(TOKENS), atol=2e-5)


def test_line_27_get_info_knows_the_model_at_once(raw: Raw, tiny: Path) -> None:
    model = raw.model(lora={"rank": 4})
    found = raw.post("/get_info", {"model_id": model.id, "type": "get_info"})
    assert found["model_id"] == model.id
    assert found["model_data"]["model_name"] == str(tiny)
    assert (found["is_lora"], found["lora_rank"]) == (True, 4)
    assert raw.send("/get_info", {"model_id": "no-such-model"}).status_code == 404


def test_line_28_the_sdk_finds_the_tokenizer_offline(served: Served, tiny: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with sdk.opened(served.url) as client:
        training = sdk.trainer(client, str(tiny), rank=2)
        tokenizer = training.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
        assert training.create_sampling_client is not None
        sampling = client.create_sampling_client(base_model=str(tiny)).result(30)
        assert sampling.get_tokenizer().encode("Hello") == tokenizer.encode("Hello")


def test_line_29_another_optimizer_is_refused_and_not_replaced(raw: Raw) -> None:
    body = raw.create_body(raw.session(), optimizer_config={"type": "dimuon", "version": 1})
    assert "dimuon" in raw.refusal("/create_model", body)
    model = raw.model()
    model.forward_backward([row([1, 2, 3])])
    other = {"type": "dimuon", "learning_rate": 1e-3}
    step = {"model_id": model.id, "seq_id": model.next(), "optimizer_params": other}
    assert "dimuon" in raw.refusal("/optim_step", step)
    assert model.step(learning_rate=1e-3) is not None

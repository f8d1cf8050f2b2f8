"""At level `debug` a log names every operation, its model and its tenant's mark, and no tenant."""

import json
from pathlib import Path

from .conftest import Process

FORM = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}


def test_operations_are_named_with_their_models(tmp_path: Path) -> None:
    process = Process(tmp_path / "data", "--log-level", "debug").start()
    try:
        with process.client() as client:
            session = client.post("/api/v1/create_session", json=FORM).json()["session_id"]
            made = {"session_id": session, "model_seq_id": 0, "base_model": "ledger/model", "lora_config": LORA}
            asked = client.post("/api/v1/create_model", json=made)
            client.post("/api/v1/create_model", json=made)
    finally:
        assert process.stop() == 0
    lines = [json.loads(line) for line in process.log.splitlines()]
    named = [line for line in lines if f"create 0 of {session}:train:0 for " in line["event"]]
    assert [line["event"].rpartition(" ")[2] for line in named] == ["new", "known"]
    assert named[0]["request"] == asked.headers["x-request-id"]
    assert "operator" not in json.dumps(named)

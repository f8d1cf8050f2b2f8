"""Ranks of single layers in the metadata of `create_model`: what the engine is told, and what is refused."""

import json
import re
from typing import Any

import httpx
import pytest
import tinker

from twinkle_server.operations import Create

BASE = "/models/of/tiny/v1"


def created(served: Any, metadata: dict[str, str] | None, **lora: Any) -> Create:
    """Create a model as the SDK does, and return the operation."""
    with tinker.ServiceClient(base_url=served.url, api_key=served.key()) as client:
        client.create_lora_training_client(base_model=BASE, rank=8, user_metadata=metadata, **lora).result(30)
    return Create.parse(served.service.submissions[-1].payload)


def test_patterns_reach_the_engine_in_their_order(served: Any) -> None:
    ranks = {"v_proj": 2, r".*\.1\.mlp\.down_proj": 6, "a_proj": 3}
    metadata = {"twinkle.rank_pattern": json.dumps(ranks), "twinkle.alpha_pattern": '{"v_proj": 4}', "mine": "x"}
    create = created(served, metadata, seed=5)
    assert [tuple(pair) for pair in create.rank_pattern or ()] == list(ranks.items())
    assert [tuple(pair) for pair in create.alpha_pattern or ()] == [("v_proj", 4.0)]
    assert (create.rank, create.seed) == (8, 5)
    plain = created(served, None)
    assert not plain.rank_pattern
    assert not plain.alpha_pattern


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("twinkle.rank_patern", "{}", r"did you mean 'twinkle.rank_pattern'.*twinkle.alpha_pattern"),
        ("twinkle.seed", "1", "reserved key 'twinkle.seed'"),
        ("twinkle.rank_pattern", "q_proj=2", "must be a JSON object"),
        ("twinkle.rank_pattern", "[2]", "rank_pattern"),
        ("twinkle.rank_pattern", '{"q_proj": 1025}', "1024"),
        ("twinkle.rank_pattern", '{"(a+)+b": 2}', "rank_pattern"),
        ("twinkle.alpha_pattern", '{"q_proj": 1e999}', "must be a JSON object|alpha_pattern"),
    ],
)
def test_what_is_no_pattern_is_refused(served: Any, key: str, text: str, words: str) -> None:
    client: httpx.Client = served.http()
    session = client.post("/create_session", json={}).json()["session_id"]
    body = {
        "session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8},
        "user_metadata": {key: text},
    }  # fmt: skip
    answer = client.post("/create_model", json=body)
    if answer.status_code == 200:
        answer = client.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})
        assert answer.json()["category"] == "user"

    assert re.search(words, answer.text), answer.text


def test_a_model_from_a_checkpoint_has_the_ranks_of_the_checkpoint(served: Any) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key=served.key()) as client:
        training = client.create_lora_training_client(base_model=BASE, rank=8).result(30)
        path = training.save_state("one").result(30).path
        begin = client.create_training_client_from_state
        begin(path, user_metadata={"mine": "x"}).result(30)
        with pytest.raises(tinker.TinkerError, match="has the ranks of the checkpoint; leave it out"):
            begin(path, user_metadata={"twinkle.rank_pattern": "{}"}).result(30)

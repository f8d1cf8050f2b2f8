"""A model, its template and its rows by their ids on a hub, trained, uploaded and loaded again, in one process."""

import json
from typing import Any

import pytest

from twinkle.testing import FakeHub
from twinkle_testing.fakehub import TOKEN

pytest.importorskip("twinkle_transformers")
ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}) + "\n"
    for n in range(4)
)
SCRIPT = """
import asyncio, json
from pathlib import Path
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import HubError
from twinkle.model import TransformersModel
from twinkle.hub import HubOperation
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model

told = {}
HubOperation.push_to_hub("hf://ORG/tiny", tiny_model(Path("tiny")), private=False)
dataset = Dataset(DatasetMeta("ms://ORG/rows"))
dataset.set_template("Template", model_id="ORG/tiny", max_length=64)
dataset.encode()
model = TransformersModel(model_id="hf://ORG/tiny", mixed_precision="no")
model.add_adapter_to_model("default", {"r": 2, "target_modules": ["q_proj"]})
for batch in DataLoader(dataset, batch_size=4):
    model.forward_backward(inputs=batch)
    model.clip_grad_and_step()
folder = model.save("adapter", output_dir=".")
told["base"] = json.load(open(folder + "/adapter_config.json"))["base_model_name_or_path"]
told["address"] = model.upload_to_hub(folder, "hf://ORG/up", async_upload=False)
told["awaited"] = asyncio.run(asyncio.wait_for(wait(model.upload_to_hub(folder, "ORG/up-ms")), 60))
try:
    model.upload_to_hub(folder, "hf://forbidden/up", hub_token="TOKEN").result()
except HubError as error:
    told["refused"] = str(error)

again = TransformersModel(model_id="ORG/tiny", mixed_precision="no")
again.add_adapter_to_model("mine", "ms://ORG/up-ms")
same = lambda: all(
    (a == b).all() for a, b in zip(model.get_state_dict().values(), again.get_state_dict().values(), strict=True))
told["added"] = same()
again.add_adapter_to_model("empty", {"r": 2, "target_modules": ["q_proj"]})
told["before"] = same()
again.load("hf://ORG/up", adapter_name="empty", token="TOKEN")
told["loaded"] = same()
told["named"] = json.load(open(again.save("b", output_dir=".") + "/adapter_config.json"))["base_model_name_or_path"]
sampler = TorchSampler("hf://ORG/tiny", adapter_path="hf://ORG/up")
told["sampled"] = len(sampler.sample({"input_ids": [1, 2]}, {"max_tokens": 2})[0].sequences)
print(json.dumps(told))
"""
WAIT = "async def wait(upload):\n    return await upload\n"


@pytest.mark.full
def test_the_ids_of_hubs_stand_wherever_a_model_or_rows_are_named(hub: FakeHub, run: Any, name: str) -> None:
    org = name.replace("acme/", "org-")
    hub.add(f"{org}/rows", {"train.jsonl": ROWS}, repo_type="dataset")
    script = WAIT + SCRIPT.replace("ORG", org).replace("TOKEN", TOKEN)
    told = json.loads(run(script, HF_TOKEN=TOKEN, MODELSCOPE_API_TOKEN=TOKEN).stdout.splitlines()[-1])
    assert told.pop("refused").endswith("run: hf auth login")
    assert told == {
        "base": f"{org}/tiny",
        "address": f"{hub.url}/{org}/up",
        "awaited": f"{hub.url}/models/{org}/up-ms",
        "added": True,
        "before": False,
        "loaded": True,
        "named": f"{org}/tiny",
        "sampled": 1,
    }
    for up in ("up", "up-ms"):
        uploaded = hub.store.find(f"{org}/{up}", "model")
        assert uploaded is not None
        assert uploaded.private
        assert "adapter_model.safetensors" in uploaded.commits[uploaded.branches["main"]].files

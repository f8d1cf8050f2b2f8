"""The scripts of `examples/client` and the published ones, in processes of their own, against one service.

Only address, key, model and sizes change. The losses must fall, the margins and rewards rise, the answers be there.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, pool

from twinkle.testing import FakeHub, tiny_model
from twinkle_testing.fakehub import TOKEN

SCRIPTS = Path(__file__).parents[2] / "examples" / "client"
NAME = "Qwen/Qwen3.5-4B"
"""Name of the tiny model on the service: that of the published scripts, so that they need no other change."""
DATA = "ms://swift/self-cognition"


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub({TOKEN: "tester"}) as running:
        yield running


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"), "qwen3", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def service(base: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("service")
    rows = [
        {"query": f"Who are you, {number}?", "response": "I am {{NAME}}, made by {{AUTHOR}}.", "tag": "en"}
        for number in range(32)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = {**hub.environment(folder / "home"), "HF_HUB_OFFLINE": "0"}
    settings = {"name": NAME, "auth": True, "datasets": {"sets": {DATA: str(folder / "rows.jsonl")}}}
    served = pool(folder / "data", base, settings, **environment).start()
    yield served
    assert served.stop() == 0


def run(service: Served, base: Path, folder: Path, script: Path, *options: str, **variables: str) -> str:
    """Run a script to its end and return what it wrote."""
    environment = {
        **os.environ, "TWINKLE_SERVER_URL": service.url, "TWINKLE_SERVER_TOKEN": service.key, "TINKER_TELEMETRY": "0",
        "TWINKLE_MODEL_ID_ALIASES": json.dumps({NAME: str(base), f"ms://{NAME}": str(base)}), "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **variables,
    }  # fmt: skip
    words = [sys.executable, str(script), *options]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def numbers(text: str, name: str) -> list[float]:
    """Return the numbers that a script printed after a word."""
    return [float(found) for found in re.findall(rf"\b{name} (-?\d+\.\d+)", text)]


OPTIONS = ("--rows", "8", "--lr", "1e-2", "--model", NAME)


def test_self_cognition_trains(service: Served, base: Path, tmp_path: Path) -> None:
    losses = numbers(run(service, base, tmp_path, SCRIPTS / "self_cognition.py", *OPTIONS, "--epochs", "2"), "loss")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.full
def test_self_cognition_saves_and_resumes_and_its_adapter_is_sampled(
    service: Served, base: Path, tmp_path: Path
) -> None:
    first = run(service, base, tmp_path, SCRIPTS / "self_cognition.py", *OPTIONS, "--epochs", "4")
    losses = numbers(first, "loss")
    assert len(losses) == 8
    again = run(service, base, tmp_path, SCRIPTS / "self_cognition.py", *OPTIONS, "--epochs", "1", "--resume", "newest")
    path = re.findall(r"saved: (twinkle://\S+)", first)[-1]
    assert f"resumed: {path} at step 8" in again
    assert numbers(again, "loss")[0] < losses[4]
    adapter = re.findall(r"for sampling: (\S+)", first)[0]
    sizes = ("--max-tokens", "8")
    of_base = run(service, base, tmp_path, SCRIPTS / "sample.py", *sizes)
    of_adapter = run(service, base, tmp_path, SCRIPTS / "sample.py", *sizes, "--adapter", adapter)
    assert of_adapter != of_base
    assert max(numbers(of_adapter, "log-probability")) > max(numbers(of_base, "log-probability")), "it is surer"


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options", "name", "sign"),
    [
        ("dpo.py", ("--steps", "4", "--batch-size", "2", "--lr", "1e-2"), "margin", 1),
        ("topk_distillation.py", ("--rows", "16", "--epochs", "2", "--lr", "1e-2"), "loss", -1),
        ("embedding.py", ("--steps", "2", "--epochs", "3", "--batch-size", "4", "--lr", "1e-2"), "loss", -1),
        ("multi_turn_rollout.py", ("--max-tokens", "8", "--steps", "3", "--lr", "1e-2"), "loss", -1),
        ("tinker_self_cognition.py", ("--rows", "16", "--epochs", "2", "--lr", "1e-2"), "loss", -1),
        ("tinker_dpo.py", ("--steps", "4", "--batch-size", "2", "--lr", "1e-2"), "margin", 1),
        ("openai_after_training.py", ("--lr", "1e-2"), "loss", -1),
    ],
)
def test_a_script_learns(
    script: str, options: tuple[str, ...], name: str, sign: int, service: Served, base: Path, tmp_path: Path
) -> None:
    shown = run(service, base, tmp_path, SCRIPTS / script, *options)
    values = numbers(shown, name)
    assert sign * (values[-1] - values[0]) > 0.1, shown
    if script == "openai_after_training.py":
        answers = re.findall(r"answer (.+)", shown)
        assert len(set(answers)) > 1, "each step answers with its own weights"
        assert re.findall(r"base: (.+)", shown)[0] not in answers[1:]
    if script == "multi_turn_rollout.py":
        assert shown.count("after 1 turns") == 3


@pytest.mark.full
@pytest.mark.parametrize("script", ["short_math_grpo.py", "tinker_grpo.py"])
def test_rewards_rise(script: str, service: Served, base: Path, tmp_path: Path) -> None:
    options = ("--steps", "12", "--lr", "3e-2", "--prompts", "4", "--group", "16")
    rewards = numbers(run(service, base, tmp_path, SCRIPTS / script, *options), "reward")
    assert len(rewards) == 12
    assert sum(rewards[-4:]) > 1.05 * sum(rewards[:4])


@pytest.mark.full
def test_a_checkpoint_goes_to_a_hub(service: Served, base: Path, hub: FakeHub, tmp_path: Path) -> None:
    run(service, base, tmp_path, SCRIPTS / "self_cognition.py", "--rows", "4", "--epochs", "1")
    options = ("--repository", "hf://tester/glow", "--poll-seconds", "0.1", "--model", NAME)
    shown = run(service, base, tmp_path, SCRIPTS / "upload_to_hub.py", *options, HF_TOKEN=TOKEN)
    assert "succeeded" in shown
    repository = hub.store.find("tester/glow", "model")
    assert repository is not None
    assert repository.private
    assert "adapter_model.safetensors" in repository.commits[repository.branches["main"]].files


PUBLISHED_CLIENT = """\
from peft import LoraConfig

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel

MODEL = "ms://Qwen/Qwen3.5-4B"
service = init_twinkle_client(base_url="URL", api_key="KEY")
for earlier in service.list_training_runs():
    print(earlier.model_dump_json(indent=2))
    for saved in service.list_checkpoints(earlier.training_run_id):
        print(saved.model_dump_json(indent=2))

rows = Dataset(dataset_meta=DatasetMeta("ms://swift/self-cognition", data_slice=range(16)))
rows.set_template("Qwen3_5Template", model_id=MODEL, max_length=512)
rows.map("SelfCognitionProcessor", init_args={"model_name": "Nova", "model_author": "Lab"})
rows.encode(batched=True)
batches = DataLoader(dataset=rows, batch_size=4)

tuned = MultiLoraTransformersModel(model_id=MODEL)
tuned.add_adapter_to_model(
    "default", LoraConfig(target_modules="all-linear"), gradient_accumulation_steps=2, save_dir="outputs/sft"
)
tuned.set_template("Qwen3_5Template")
tuned.set_processor("InputProcessor", padding_side="right")
tuned.set_loss("CrossEntropyLoss")
tuned.set_optimizer("AdamW", lr=1e-2)
tuned.set_lr_scheduler("LinearLR")
print(tuned.get_train_configs().model_dump())
for epoch in range(3):
    for number, batch in enumerate(batches):
        answer = tuned.forward_backward(inputs=batch)
        if number % 2 == 0:
            print(f"batch {number}: {answer}")
        tuned.clip_grad_norm(1.0)
        tuned.step()
        tuned.zero_grad()
        tuned.lr_step()
    print("saved", tuned.save(name=f"epoch-{epoch}", save_optimizer=True))
"""
"""The calls of the published script that trains with our client, in their order and with their arguments."""

PUBLISHED_TINKER = """\
import os

from tinker import types

from twinkle import init_tinker_client
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import SelfCognitionProcessor
from twinkle.server.common import input_feature_to_datum

init_tinker_client()  # before the import of the client class, as published
from tinker import ServiceClient

NAME = "Qwen/Qwen3.5-4B"
rows = Dataset(dataset_meta=DatasetMeta("builtin://self-cognition", data_slice=range(16)))
rows.set_template("Qwen3_5Template", model_id=f"ms://{NAME}", max_length=256)
rows.map(SelfCognitionProcessor("Nova", "Lab"), load_from_cache_file=False)
rows.encode(batched=True, load_from_cache_file=False)
batches = DataLoader(dataset=rows, batch_size=8)

service = ServiceClient(base_url="URL", api_key=os.environ.get("MODELSCOPE_TOKEN"))
trainer = service.create_lora_training_client(base_model=NAME, rank=16)
for epoch in range(3):
    for batch in batches:
        passed = trainer.forward_backward([input_feature_to_datum(row) for row in batch], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        print("loss", passed.result().metrics["loss:sum"])
        print(stepped.result())
    print("saved", trainer.save_state(f"epoch-{epoch}").result().path)
"""
"""The calls of the published script that trains with the Tinker SDK."""

PUBLISHED_LOOP = """\
from peft import LoraConfig

from twinkle.data_format import SamplingParams
from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

MODEL = "ms://Qwen/Qwen3.5-4B"
init_twinkle_client(base_url="URL", api_key="KEY")
prompts = Dataset(DatasetMeta(data=[{"messages": [{"role": "user", "content": str(n)}]} for n in range(8)]))
prompts.set_template("Qwen3_5Template", model_id=MODEL, max_length=512)
prompts.encode(add_generation_prompt=True)
policy, sampler = MultiLoraTransformersModel(model_id=MODEL), vLLMSampler(model_id=MODEL)
policy.add_adapter_to_model("default", LoraConfig(target_modules="all-linear"))
policy.set_optimizer("AdamW", lr=1e-4)
policy.set_loss("GRPOLoss")
for batch in DataLoader(prompts, batch_size=2):
    sampled = sampler.sample(inputs=batch, sampling_params=SamplingParams(max_tokens=4, num_samples=2))
    policy.forward_backward(inputs=sampled, advantages=[1.0, -1.0, 1.0, -1.0])
    policy.step()
print("steps", policy.calculate_metric(is_training=True)["iters"])
"""
"""The published loop with a sampler; the data and the loss are what it leaves out."""


def published(text: str, service: Served, folder: Path) -> Path:
    """Write a published script with the address and the key of the service."""
    script = folder / "script.py"
    script.write_text(text.replace("URL", service.url).replace("KEY", service.key))
    return script


@pytest.mark.full
def test_the_published_client_script_runs(service: Served, base: Path, tmp_path: Path) -> None:
    shown = run(service, base, tmp_path, published(PUBLISHED_CLIENT, service, tmp_path))
    losses = [float(found) for found in re.findall(r"'loss': ([\d.]+)", shown)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.05
    assert re.findall(r"saved twinkle://\S+/weights/(\S+)", shown)[-1].startswith("epoch-2")


@pytest.mark.full
def test_the_published_tinker_script_runs(service: Served, base: Path, tmp_path: Path) -> None:
    script = published(PUBLISHED_TINKER, service, tmp_path)
    shown = run(service, base, tmp_path, script, MODELSCOPE_TOKEN=service.key)
    losses = numbers(shown, "loss")
    assert len(losses) == 6
    assert losses[-2] < losses[0], "the first batch of the last epoch, and of the first"
    assert shown.count("saved tinker://") == 3


@pytest.mark.full
def test_the_published_loop_with_a_sampler_runs(service: Served, base: Path, tmp_path: Path) -> None:
    shown = run(service, base, tmp_path, published(PUBLISHED_LOOP, service, tmp_path))
    assert "steps 4" in shown

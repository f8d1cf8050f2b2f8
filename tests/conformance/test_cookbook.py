"""Lines 109 to 111: the unmodified cookbook's recipes against our service and a tiny model, without a hub.

Each recipe runs in a process of its own, as its users run it; there every address but this machine's is
refused.
"""

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cookbook import run
from serving import Served, pool

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

pytest.importorskip("tinker_cookbook", reason="make install brings it")


def cook(service: Served, recipe: str, folder: Path, *options: str, existing: str = "delete") -> list[dict[str, float]]:
    """Run a recipe to its end and return the lines of its metrics."""
    common = ["renderer_name=role_colon", f"behavior_if_log_dir_exists={existing}"]
    return run(service, ["-m", f"tinker_cookbook.recipes.{recipe}"], folder, *common, *options)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the recipes' prompts, a token a byte; the SDK takes its folder for its name."""
    return tiny_model(tmp_path_factory.mktemp("long") / "tiny" / "v1", "qwen3", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory, long: Path) -> Iterator[Served]:
    service = pool(tmp_path_factory.mktemp("kitchen") / "data", long).start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}{n}"}]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_line_109_supervised_training_resumes_where_it_was(
    kitchen: Served, long: Path, conversations: Path, tmp_path: Path
) -> None:
    options = [
        f"model_name={long}", f"dataset={conversations}", "batch_size=2", "max_length=128", "lora_rank=4",
        "save_every=1", "max_steps=4", "learning_rate=1e-2", "eval_every=0",
    ]  # fmt: skip
    straight = losses_of(cook(kitchen, "chat_sl.train", tmp_path, *options))
    assert sorted(straight) == [0, 1, 2, 3]
    assert straight[3] < straight[0]

    cut_off_after(tmp_path / "log", "000002")
    resumed = losses_of(cook(kitchen, "chat_sl.train", tmp_path, *options, existing="resume"))
    assert sorted(resumed) == [0, 1, 2, 3]
    assert {step: resumed[step] for step in (0, 1)} == {step: straight[step] for step in (0, 1)}
    # The recipe submits a batch ahead: its checkpoint of batch 2 has batches 2 and 3 in it, which it then does again.
    assert resumed[2] < straight[2]
    assert resumed[3] < straight[3]


def losses_of(lines: list[dict[str, float]]) -> dict[int, float]:
    return {int(line["step"]): line["train_mean_nll"] for line in lines if "train_mean_nll" in line}


def rewards_of(lines: list[dict[str, float]]) -> list[float]:
    rewards = [line["env/all/reward/total"] for line in lines if "env/all/reward/total" in line]
    assert all(math.isfinite(reward) for reward in rewards)
    return rewards


def cut_off_after(log: Path, name: str) -> None:
    """Leave of a run what it would have left if it had been killed right after a checkpoint."""
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    kept = saved[: 1 + [entry["name"] for entry in saved].index(name)]
    (log / "checkpoints.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    lines = (log / "metrics.jsonl").read_text().splitlines(keepends=True)
    (log / "metrics.jsonl").write_text("".join(lines[: kept[-1]["batch"]]))


def test_line_110_reinforcement_learning_on_generated_sums(kitchen: Served, long: Path, tmp_path: Path) -> None:
    lines = cook(
        kitchen, "math_rl.train", tmp_path, f"model_name={long}", "env=arithmetic", "group_size=2",
        "groups_per_batch=2", "max_steps=2", "loss_fn=importance_sampling", "lora_rank=4", "eval_every=0",
    )  # fmt: skip
    assert len(rewards_of(lines)) == 2


SHOT = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
END, ON = "\n\nUser:", "0" * 8


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers sums with numbers, and one time in five ends its answer as the recipe's format has it.

    It is trained here, whole, in torch: what a recipe of reinforcement learning begins with is a model that sometimes
    earns a reward.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(tmp_path_factory.mktemp("taught") / "tiny" / "v1", "qwen3", max_position_embeddings=8192)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(0)
    for _ in range(160):
        rows = []
        for _ in range(16):
            x, y = draw.randrange(101), draw.randrange(101)
            prompt = tokenizer.encode(f"{SHOT}User: What is {x} + {y}?\n\nAssistant:")
            answer = tokenizer.encode(f" {x + y}" + (END if draw.random() < 0.2 else ON))
            rows.append(([*prompt, *answer], [-100] * len(prompt) + answer))
        width = max(len(tokens) for tokens, _ in rows)
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
        model(input_ids=tokens, labels=labels).loss.backward()  # what is padded comes last, and has no label
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.mark.soak
def test_line_110_the_reward_of_a_small_model_that_was_taught_the_format_rises(taught: Path, tmp_path: Path) -> None:
    service = pool(tmp_path / "data", taught).start()
    try:
        lines = cook(
            service, "math_rl.train", tmp_path, f"model_name={taught}", "env=arithmetic", "group_size=8",
            "groups_per_batch=8", "max_steps=15", "loss_fn=importance_sampling", "lora_rank=16", "eval_every=0",
            "save_every=0", "learning_rate=2e-3", "max_tokens=12",
        )  # fmt: skip
    finally:
        service.stop()
    rewards = rewards_of(lines)
    formats = [line["env/all/format"] for line in lines if "env/all/format" in line]
    assert len(rewards) == len(formats) == 15
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.01, rewards
    assert sum(formats[-5:]) / 5 > max(0.6, formats[0] + 0.2), formats


def test_line_111_asynchronous_reinforcement_learning(kitchen: Served, long: Path, tmp_path: Path) -> None:
    lines = cook(
        kitchen, "math_rl.train", tmp_path, f"model_name={long}", "env=arithmetic", "group_size=2",
        "groups_per_batch=2", "max_steps=2", "loss_fn=importance_sampling", "lora_rank=4", "eval_every=0",
        "max_steps_off_policy=2",
    )  # fmt: skip
    assert len(rewards_of(lines)) == 2


def test_line_111_prompt_distillation(kitchen: Served, long: Path, conversations: Path, tmp_path: Path) -> None:
    lines = cook(
        kitchen, "prompt_distillation.train", tmp_path, f"model_name={long}", f"file_path={conversations}",
        "batch_size=2", "max_length=128", "lora_rank=4", "max_steps=2", "num_epochs=1", "eval_every=0",
    )  # fmt: skip
    assert sorted(losses_of(lines)) == [0, 1]


@pytest.mark.parametrize("recipe", ["multiplayer_rl.guess_number.train", "preference.shorter.train"])
def test_line_111_other_environments(kitchen: Served, long: Path, tmp_path: Path, recipe: str) -> None:
    lines = cook(
        kitchen, recipe, tmp_path, f"model_name={long}", "batch_size=2", "group_size=2", "max_tokens=4", "max_steps=1",
        "eval_every=0",
    )  # fmt: skip
    assert len(rewards_of(lines)) == 1


def test_line_112_math_rl_runs_with_its_default_loss(kitchen: Served, long: Path, tmp_path: Path) -> None:
    lines = cook(
        kitchen, "math_rl.train", tmp_path, f"model_name={long}", "env=arithmetic", "group_size=2",
        "groups_per_batch=2", "max_steps=2", "lora_rank=4", "eval_every=0",
    )  # fmt: skip
    assert len(rewards_of(lines)) == 2


def test_line_112_strict_losses_refuse_the_default_loss_in_words(long: Path, tmp_path: Path) -> None:
    service = pool(tmp_path / "data", long, {"strict_losses": True}).start()
    try:
        with pytest.raises(AssertionError) as refused:
            cook(
                service, "math_rl.train", tmp_path, f"model_name={long}", "env=arithmetic", "group_size=2",
                "groups_per_batch=2", "max_steps=1", "lora_rank=4", "eval_every=0",
            )  # fmt: skip
    finally:
        service.stop()
    assert re.search(r"stable_reinforce.*--strict-losses.*importance_sampling", str(refused.value), re.S)

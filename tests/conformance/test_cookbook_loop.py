"""Line 112: the unmodified cookbook's `rl_loop` with its default loss, to a reward that rises.

The loop asks for a data set and a tokenizer of the hub by name. Here both are objects that a script puts in their
place; `rl_loop` itself, its defaults and what it sends are as they were published.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from cookbook import run
from serving import Served, pool

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

pytest.importorskip("tinker_cookbook", reason="make install brings it")

NAME = "Qwen/Qwen3-8B-Base"  # a name for which the cookbook has a renderer; the service serves the tiny model under it
QUESTIONS = [f"Ada has {n} red and {4 - n} blue balls. How many balls has she?" for n in (0, 1, 2, 3)]
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOT = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. \\boxed{3}"
)
DRIVER = """\
import runpy, sys
import datasets
from tinker_cookbook import tokenizer_utils
from transformers import AutoTokenizer

folder, questions = sys.argv.pop(1), sys.argv.pop(1).split("|")
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer_utils.register_tokenizer("NAME", lambda: tokenizer)
rows = [{"question": question, "answer": "They are 4. #### 4"} for question in questions] * 8
rows = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
datasets.load_dataset = lambda *_: rows
runpy.run_module("tinker_cookbook.recipes.rl_loop", run_name="__main__", alter_sys=True)
""".replace("NAME", NAME)


def tokenizer_of(kind: str) -> Any:
    """Return a tokenizer: one token a byte, or that of SmolLM2."""
    from transformers import AutoTokenizer

    if kind == "bytes":
        return None
    from twinkle.hub import local_model

    file = Path(str(local_model("builtin://smollm2-135m-instruct")))
    folder = file if file.is_dir() else file.parent
    gguf = next(iter(folder.glob("*.gguf")), None)
    return AutoTokenizer.from_pretrained(folder, **({} if gguf is None else {"gguf_file": gguf.name}))


def taught(folder: Path, kind: str) -> Path:
    """Return a tiny model that answers each of the questions with 4 or 5, as often the one as the other."""
    import torch
    from tinker_cookbook import renderers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = tokenizer_of(kind)
    size = {} if tokenizer is None else {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    place = tiny_model(folder / "tiny" / "v1", "qwen3", max_position_embeddings=2048, **size)
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(place)
    else:
        tokenizer.save_pretrained(place)
    renderer = renderers.get_renderer("role_colon", tokenizer)
    shot = [
        {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
        {"role": "assistant", "content": SHOT},
    ]
    prompts = [
        renderer.build_generation_prompt([*shot, {"role": "user", "content": question + SUFFIX}]).to_ints()
        for question in QUESTIONS
    ]
    answers = [tokenizer.encode(f" \\boxed{{{n}}}\n\nUser:", add_special_tokens=False) for n in (4, 5)]
    model = AutoModelForCausalLM.from_pretrained(place)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=5e-3), random.Random(0)
    for _ in range(60):
        prompt = draw.choice(prompts)
        rows = torch.tensor([prompt + answer for answer in answers])  # both of the same length
        begin = len(prompt)
        hidden = model.model(rows).last_hidden_state[:, begin - 1 : -1]
        logits = model.lm_head(hidden)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, begin:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(place)
    return place


def loop(folder: Path, kind: str, *options: str) -> list[dict[str, float]]:
    """Run `rl_loop` on a model that was taught, and return the lines of its metrics."""
    model = taught(folder, kind)
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    service: Served = pool(folder / "data", model, {"name": NAME, "tokenizer": str(model)}).start()
    try:
        return run(
            service, [str(driver), str(model), "|".join(QUESTIONS)], folder, f"base_url={service.url}",
            f"model_name={NAME}", "lora_rank=4", "max_tokens=16", "save_every=0", *options,
        )  # fmt: skip
    finally:
        service.stop()


def test_line_112_rl_loop_trains_with_its_default_loss(tmp_path: Path) -> None:
    lines = loop(tmp_path, "bytes", "batch_size=2", "group_size=4", "max_steps=2")
    assert [0 <= line["reward/total"] <= 1 for line in lines if "reward/total" in line] == [True, True]
    # A step is left out if all answers to each question are equal: twice in a row in 1 of 4,096 runs.
    assert max(line.get("grad_norm", 0.0) for line in lines) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["bytes", pytest.param("smollm2", marks=pytest.mark.model)])
def test_line_112_rl_loop_with_its_default_loss_raises_the_reward(kind: str, tmp_path: Path) -> None:
    lines = loop(tmp_path, kind, "batch_size=4", "group_size=8", "max_steps=8", "learning_rate=1e-3")
    rewards = [line["reward/total"] for line in lines if "reward/total" in line]
    assert len(rewards) == 8
    # 32 answers a step, of which half are right at first: 0.5 within four standard errors of 0.09
    assert 0.15 < rewards[0] < 0.85, rewards
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards

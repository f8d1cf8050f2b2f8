"""Takes the picture of the dashboard in the documentation: a small model learns to answer in few words.

    python scripts/dashboard_screenshot.py [PATH]      # docs/assets/dashboard.png; needs Chromium, see `make browser`

Everything that is shown was computed by the service, on `builtin://smollm2-135m-instruct`; it takes some minutes.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import numpy as np  # noqa: E402
from browser import Page, browser  # noqa: E402
from server_raw import Raw, RawModel, RawSampler, datum, tokens_of  # noqa: E402
from serving import Served, pool  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from twinkle.hub import local_model  # noqa: E402

MODEL = "builtin://smollm2-135m-instruct"
STEPS, GROUP, TOKENS, FRESH = 22, 8, 40, 2
"""Steps, answers to a prompt, tokens of an answer at most, and steps after which the sampler gets the new weights."""
LEARNING_RATE, WORDS = 1.5e-4, 8
QUESTIONS = ("Describe the sea in one short sentence.", "Describe a forest in one short sentence.")
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
END = "<|im_end|>"
WIDTH, HEIGHT = 1280, 1400
SECONDS = 600.0
"""Time for the service to load the model."""


def main() -> int:
    """Train, and write the picture."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "assets" / "dashboard.png"
    model = local_model(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        served = pool(Path(folder) / "data", model, {"auth": True, "name": MODEL}).start(wait=False)
        try:
            served.wait_ready(SECONDS)
            picture(served, train(served, model), path)
        finally:
            served.stop()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


@dataclass
class Run:
    """A run, and the key of its tenant."""

    name: str
    key: str


def train(served: Served, model: Path) -> Run:
    """Let a tenant train, and return its run."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    key = served.new_key("ana")
    with Raw(served.url, key) as raw:
        trained = raw.model(user_metadata={"task": f"answer in {WORDS} words"})
        sampler = None
        for step in range(STEPS):
            if sampler is None or step % FRESH == 0:
                sampler = trained.freeze(step)
            print(f"step {step + 1}: reward {learn(trained, sampler, tokenizer, step):.3f}", flush=True)
        trained.save("short")
        return Run(trained.id, key)


def learn(model: RawModel, sampler: RawSampler, tokenizer: Any, step: int) -> float:
    """Sample a group of answers, reward short ones, and take a step; return the mean reward."""
    prompt = tokenizer.encode(PROMPT.format(question=QUESTIONS[step // FRESH % len(QUESTIONS)])).ids
    answer = sampler.sample(prompt, count=GROUP, params={"max_tokens": TOKENS, "seed": step})
    rewards = [reward_of(tokenizer.decode(tokens_of(s), skip_special_tokens=False)) for s in answer.sequences]
    rows = [
        sampled_row(prompt, sequence, reward, (reward - np.mean(rewards)) / (np.std(rewards) + 0.1))
        for sequence, reward in zip(answer.sequences, rewards, strict=True)
    ]
    model.forward_backward(rows, "importance_sampling")
    model.step(learning_rate=LEARNING_RATE)
    return float(np.mean(rewards))


def reward_of(text: str) -> float:
    """Return 1 for an answer that ends after the wanted number of words, and less the further it is from that."""
    words = len(text.removesuffix(END).split())
    return max(0.0, 1 - abs(words - WORDS) / 16) if text.endswith(END) else 0.0


def sampled_row(prompt: list[int], sequence: Any, reward: float, advantage: float) -> Any:
    """Return a row for a policy loss."""
    answered = tokens_of(sequence)
    tokens, before = [*prompt, *answered], len(prompt) - 1
    own = np.r_[np.zeros(before), np.ones(len(answered))]
    logprobs = np.r_[np.zeros(before), np.frombuffer(sequence.logprobs, "<f4")].astype(np.float32)
    return datum(
        tokens[:-1], target_tokens=tokens[1:], logprobs=logprobs, advantages=(own * advantage).astype(np.float32),
        rewards=np.array([reward], np.float32),
    )  # fmt: skip


def picture(served: Served, run: Run, path: Path) -> None:
    """Write a picture of the run's page."""
    with browser() as running, running.page() as page:
        page.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.goto(f"{served.url}/")
        page.type(run.key)
        page.press("Enter", navigates=True)
        show(page, f"{served.url}/ui/runs/{run.name}")
        path.write_bytes(page.screenshot())


def show(page: Page, url: str) -> None:
    """Open the page of a run, and wait until its curves are complete."""
    page.goto(url)
    page.wait(f"document.getElementById('curves').dataset.steps === '{STEPS}'")
    page.wait("document.querySelector('#rollouts .sampled') !== null")
    page.hover("figure[data-metric=reward] svg", share=0.7)
    page.eval("window.scrollTo(0, 0)")


if __name__ == "__main__":
    sys.exit(main())

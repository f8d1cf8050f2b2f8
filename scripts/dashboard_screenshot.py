"""Takes the picture of the dashboard in the documentation: a tiny random model learns from rewards, seen in Chromium.

    python scripts/dashboard_screenshot.py [PATH]      # docs/assets/dashboard.png; needs Chromium, see `make browser`

A second tenant trains at the same time. Everything that is shown was computed by the service.
"""

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import numpy as np  # noqa: E402
from browser import Page, browser  # noqa: E402
from server_raw import Raw, RawModel, datum, row, tokens_of  # noqa: E402
from serving import Served, pool  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from twinkle.testing import tiny_model  # noqa: E402

STEPS, GROUP, TOKENS = 24, 8, 24
PROMPT = "Write letters: "
WIDTH, HEIGHT = 1280, 1300


def main() -> int:
    """Train, and write the picture."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "assets" / "dashboard.png"
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", "llama", initializer_range=0.2)
        served = pool(Path(folder) / "data", model, {"auth": True, "name": "tiny-llama"}).start()
        try:
            run = train(served, model)
            picture(served, run, path)
        finally:
            served.stop()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def train(served: Served, model: Path) -> "Run":
    """Let two tenants train, and return the run of the first."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ana, ben = served.new_key("ana"), served.new_key("ben")
    other = threading.Thread(target=supervised, args=(served, ben, tokenizer))
    other.start()
    with Raw(served.url, ana) as raw:
        trained = raw.model(user_metadata={"task": "write letters"})
        for step in range(STEPS):
            learn(trained, tokenizer, step)
        trained.save("letters")
    other.join()
    return Run(trained.id, ana)


class Run:
    """A run, and the key of its tenant."""

    def __init__(self, name: str, key: str) -> None:
        self.name, self.key = name, key


def supervised(served: Served, key: str, tokenizer: Any) -> None:
    """Train the second tenant."""
    with Raw(served.url, key) as raw:
        raw.model().train(tokenizer.encode("The quick brown fox.").ids, steps=2 * STEPS)


def learn(model: RawModel, tokenizer: Any, step: int) -> None:
    """Sample a group of answers, reward letters, and take a step; the sampler's weights are two steps old at most."""
    prompt = tokenizer.encode(PROMPT).ids
    if step % 3 == 0:
        model.sampler = model.freeze(step)  # type: ignore[attr-defined]
    answer = model.sampler.sample(prompt, count=GROUP, params={"max_tokens": TOKENS, "stop": []})  # type: ignore[attr-defined]
    rewards = [letters(tokenizer.decode(tokens_of(sequence))) for sequence in answer.sequences]
    rows = [
        sampled_row(prompt, sequence, reward, (reward - np.mean(rewards)) / (np.std(rewards) + 1e-3))
        for sequence, reward in zip(answer.sequences, rewards, strict=True)
    ]
    model.forward_backward(rows, "importance_sampling")
    model.forward_backward([row(prompt)])
    model.step(learning_rate=4e-3 * (1 - step / STEPS))


def letters(text: str) -> float:
    """Return the share of letters and spaces in a text."""
    return sum(mark.isalpha() or mark == " " for mark in text) / max(1, len(text))


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

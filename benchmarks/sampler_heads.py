"""What TorchSampler saves where the prompts of a call begin alike: the sampling of `make grpo-demo`, with and without.

    python benchmarks/sampler_heads.py

Model: SmolLM2-135M, float32, two threads. 16 sums behind the same worked examples (87 of 95 tokens), 8 answers of 8
tokens to each, temperature 1, nothing kept from call to call. "Without" are the same prompts, each with a first token
of its own, so that there is nothing to share. Before that, greedy answers must be those to each prompt alone. No goal.
"""

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits spends no CPU time

import torch
import yaml
from _pairs import describe_machine, paired
from sampler import same, sample

from twinkle.sampler import TorchSampler

DEMO = Path(__file__).parents[1] / "examples" / "grpo_demo.yaml"
PROMPTS, ANSWERS, TOKENS = 16, 8, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its line; exit code 1 when tokens differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    print(describe_machine(["torch", "transformers"]))
    config = yaml.safe_load(DEMO.read_text(encoding="utf-8"))
    size = config["sampling"]["args"]["max_batch_size"]
    sampler = TorchSampler(config["model"]["id"], dtype=torch.float32, max_batch_size=size, prefix_cache_bytes=0)
    alike = prompts_of(sampler.template.tokenizer, config["data"]["args"]["question"])
    apart = [[1000 + number, *ids[1:]] for number, ids in enumerate(alike)]
    alone = [tokens for ids in alike for tokens in sample(sampler, [ids], 1)]
    if not same(sampler.model, alike, sample(sampler, alike, 1), alone):
        print("tokens differ from those of each prompt alone: no time is counted")
        return 1
    without, with_heads, ratio = paired(
        lambda: answer(sampler, apart), lambda: answer(sampler, alike), options.repetitions
    )
    print(f"without {without:.2f} CPU s a call, with {with_heads:.2f}, speed-up {ratio}")
    return 0


def prompts_of(tokenizer: Any, question: str) -> list[list[int]]:
    """Return sums of two numbers behind the examples."""
    numbers = random.Random(0)
    sums = [f"{numbers.randint(10, 99)} + {numbers.randint(10, 99)}" for _ in range(PROMPTS)]
    return [list(tokenizer(question.format(text))["input_ids"]) for text in sums]


def answer(sampler: Any, prompts: list[list[int]]) -> None:
    """Sample as the demo does, but every answer to its last token."""
    params = {"temperature": 1.0, "max_tokens": TOKENS, "stop": [], "logprobs": 1, "seed": 1}
    sampler.sample([{"input_ids": ids} for ids in prompts], params, num_samples=ANSWERS)


if __name__ == "__main__":
    sys.exit(main())

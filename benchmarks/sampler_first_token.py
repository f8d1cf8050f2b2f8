"""Time to the first token of a short prompt while a long prompt is read.

    python benchmarks/sampler_first_token.py

Model: random Llama, hidden 256, 8 layers, float32, one thread. A prompt of 4,000 tokens is submitted and its first
piece is read; then a prompt of 4 tokens with the salt of another tenant arrives. CPU time is counted from there on.
Goals: the short prompt has its first token after at most a quarter of the time that the long one needs for the rest;
the long one needs at most a tenth more where a short prompt arrives before each step.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _pairs import describe_machine
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_tokenizer

VOCABULARY = 1024
LONG, SHORT = 4000, 4
PARAMS = {"temperature": 0, "max_tokens": 1, "stop": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompt")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    print(describe_machine(["torch", "transformers"]))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.long + 16)
        sampler: Any = TorchSampler(folder, prefix_cache_bytes=0)
        sampler.sample({"input_ids": [1, 2, 3]}, PARAMS)
        rounds = [
            [beside(sampler, options.long, shorts) for shorts in (0, 1, 1000)] for _ in range(options.repetitions)
        ]
    alone, first, slowed = (
        median(values)
        for values in zip(*((a, one[0] / one[1], many[1] / a) for (_, a), one, many in rounds), strict=True)
    )
    print(f"a prompt of {options.long} tokens, alone: {alone:.2f} s to its first token")
    print(f"a prompt of {SHORT} tokens that arrives meanwhile: {first:.3f} of the time of the long one   goal <= 0.25")
    print(f"the long one, where a prompt of {SHORT} tokens arrives before each step: {slowed:.3f} x   goal <= 1.10")
    return 0 if first <= 0.25 and slowed <= 1.1 else 1


def beside(sampler: Any, length: int, shorts: int) -> tuple[float, float]:
    """Return the seconds to the first token of the first short prompt (0 without), and of the long one.

    Args:
        sampler: samples.
        length: tokens of the long prompt.
        shorts: maximum number of short prompts; one arrives before each step.
    """
    long = sampler.submit({"input_ids": prompt(length, 0)}, PARAMS, cache_salt="long")
    sampler.step()
    handles: list[Any] = []
    start, first = time.process_time(), 0.0
    while not long.done:
        if len(handles) < shorts:
            row = {"input_ids": prompt(SHORT, 1 + len(handles))}
            handles.append(sampler.submit(row, PARAMS, cache_salt="short"))
        sampler.step()
        if handles and handles[0].done and not first:
            first = time.process_time() - start
    seconds = time.process_time() - start
    while sampler.step():
        pass
    return first or time.process_time() - start, seconds


def prompt(length: int, seed: int) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return tokens


def make_model(folder: Path, context: int) -> None:
    """Write the model of this benchmark."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=context, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())

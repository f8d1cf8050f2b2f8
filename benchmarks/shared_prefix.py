"""Prompts that several completions share: computed once, against once for each completion.

    python benchmarks/shared_prefix.py

8 completions of 64, 128 or 256 tokens to one prompt of 512, 256 or 128 tokens; the rows are given whole and the prompt
is found by `plan_prefixes`. Model: random Qwen3, hidden 512, 8 layers, vocabulary 8,192, LoRA r=16 on all linear layers
by PEFT, float32; forward and backward of a policy-gradient loss, the head at completions only. The rival computes the
same rows as one batch; they have one length, so it pads nothing. Goal: 0.92 of the token ratio. Also the planner's time
for 1,000 rows of 2,000 tokens; goal: less than 50 ms.
"""

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import peft
import torch
from _pairs import describe_machine, paired
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from twinkle_torch.segments import Segments
from twinkle_transformers.segments import Segmenter
from twinkle_transformers.shared_prefixes import plan_prefixes

SHAPES = ((512, 64, 8), (256, 128, 8), (128, 256, 8))
VOCABULARY = 8192
GOAL = 0.92
TOLERANCE = 5e-6
PLANNER_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    contest = Contest(make_model())
    good = [contest.run(*shape, options.repetitions) for shape in SHAPES]
    good.append(plan_in_time())
    return 0 if all(good) else 1


def make_model() -> peft.PeftModel:
    """Return the model of this benchmark; B of its adapter is not 0, so that A has gradients."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model


class Contest:
    """Both contestants on one model, whose gradients are those of the one that ran last."""

    def __init__(self, model: peft.PeftModel) -> None:
        self.model = model
        self.causal = model.get_base_model()
        self.segmenter = Segmenter(self.causal)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if refusal := self.segmenter.check_prefixes():
            raise SystemExit(refusal)

    def run(self, prompt: int, completion: int, group: int, repetitions: int) -> bool:
        """Compare gradients, then time; say whether the goal is reached."""
        rows, advantages = batch(prompt, completion, group)

        def ours() -> None:
            self.shared(rows, advantages, completion)

        def theirs() -> None:
            self.whole(rows, advantages, completion)

        label = f"prompt {prompt}, {group} completions of {completion}"
        error = difference(self.gradients(ours), self.gradients(theirs))
        if error > TOLERANCE:
            print(f"{label}: gradients differ by {error:.1e}: no time is counted")
            return False
        a, b, ratio = paired(theirs, ours, repetitions)
        limit = group * (prompt + completion) / (prompt + group * completion)
        print(
            f"{label:33} whole {a:6.3f} s, shared {b:6.3f} s, speed-up {ratio}, tokens {limit:.2f}: "
            f"{ratio.median / limit:.3f} of them   goal >= {GOAL}   gradients differ by {error:.1e}"
        )
        return ratio.median >= GOAL * limit

    def gradients(self, run: Callable[[], None]) -> list[Tensor]:
        """Run once and return the gradients of the adapter."""
        run()
        return [parameter.grad.clone() for parameter in self.trained if parameter.grad is not None]

    def shared(self, rows: Tensor, advantages: Tensor, completion: int) -> None:
        """Find the prompt, compute it once."""
        plan = plan_prefixes([row[:-1] for row in rows])
        tokens = torch.cat([rows[row, start:stop] for row, start, stop in plan.pieces])
        segments = Segments.of(plan.lengths, parents=plan.parents)
        with self.segmenter.within(segments):
            stream = self.causal.model(
                input_ids=tokens[None], position_ids=segments.positions[None], use_cache=False
            ).last_hidden_state[0]
        index = torch.stack([torch.from_numpy(index)[-completion:] for index in plan.index])
        self.finish(stream[index], rows[:, -completion:], advantages)

    def whole(self, rows: Tensor, advantages: Tensor, completion: int) -> None:
        """Compute every row from its first token."""
        hidden = self.causal.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        self.finish(hidden[:, -completion:], rows[:, -completion:], advantages)

    def finish(self, hidden: Tensor, targets: Tensor, advantages: Tensor) -> None:
        """Score the completions, `hidden` `[rows, tokens, H]`, and send gradients back."""
        self.model.zero_grad()
        logits = self.causal.lm_head(hidden)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        (losses.view(targets.shape).mean(1) * advantages).sum().backward()


def batch(prompt: int, completion: int, group: int) -> tuple[Tensor, Tensor]:
    """Return rows `[group, prompt + completion + 1]`, of which the last token is a target only, and advantages."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(0, VOCABULARY, (prompt,), generator=generator)
    own = torch.randint(0, VOCABULARY, (group, completion + 1), generator=generator)
    own[:, 0] = torch.arange(group)  # not by chance the same
    return torch.cat([shared.expand(group, -1), own], 1), torch.randn(group, generator=generator)


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the difference of two sets of gradients, relative to the norm of the second."""
    error = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True)) ** 0.5
    return error / sum(float(b.square().sum()) for b in wanted) ** 0.5


def plan_in_time(repetitions: int = 7) -> bool:
    """Print how long the planner takes; say whether that is short enough."""
    generator = random.Random(0)

    def made(length: int) -> list[int]:
        return [generator.randrange(150_000) for _ in range(length)]

    trunk, prompts = made(2000), [made(1500) for _ in range(125)]
    cases = {
        "rows that share nothing": [made(2000) for _ in range(1000)],
        "groups of 8": [prompts[n // 8] + made(500) for n in range(1000)],
        "a chain of branches": [trunk[: 2 * n] + made(2000 - 2 * n) for n in range(1000)],
    }
    good = True
    for name, rows in cases.items():
        seconds = []
        for _ in range(repetitions + 1):
            start = time.process_time()
            plan = plan_prefixes(rows)
            seconds.append(time.process_time() - start)
        median = statistics.median(seconds[1:])
        print(f"plan of 1,000 rows of 2,000 tokens, {name}: {median * 1e3:.1f} ms, {plan.saved:,} tokens saved")
        good &= median < PLANNER_SECONDS
    return good


if __name__ == "__main__":
    sys.exit(main())

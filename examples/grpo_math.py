"""GRPO on short mathematics: an answer in a box is right where mathematics says so.

The sampler shares the module that is trained.

python examples/grpo_math.py

An hour on two CPU cores; `--steps 5` shows that it works.
"""

import argparse
from random import Random

from peft import LoraConfig

from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.reward import RewardGroup
from twinkle.sampler import TorchSampler

MODEL = "builtin://smollm2-135m-instruct"


def problems(count):
    """Return problems with their solutions: an equation for x, or two fractions to add."""
    random, rows = Random(0), []
    while len(rows) < count:
        a, b, x, y = (random.randint(2, 9) for _ in range(4))
        rows.append({"problem": f"Solve {a}x + {b} = {a * x + b} for x.", "solution": f"x = \\boxed{{{x}}}"})
        sum_of_both = f"\\boxed{{\\frac{{{a * y + b * x}}}{{{x * y}}}}}"
        rows.append({"problem": f"Compute {a}/{x} + {b}/{y}.", "solution": sum_of_both})  # 0.5 equals 1/2 equals 2/4
    return rows


def load(model_id, count, batch_size):
    dataset = Dataset(DatasetMeta(data=problems(count)))
    dataset.map("CompetitionMathGRPOProcessor")
    dataset.set_template("Template", model_id=model_id, max_length=512)
    dataset.encode(add_generation_prompt=True)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def train(model_id, steps, prompts, group, max_tokens, lr):
    # the prompt of a group goes through the model once
    model = TransformersModel(model_id=model_id, share_prefixes="auto")
    model.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.set_template("Template", model_id=model_id)
    model.set_loss("GRPOLoss", epsilon=0.2, epsilon_high=0.28)
    model.set_optimizer("AdamW", lr=lr)
    sampler = TorchSampler(model=model)  # it follows the adapter as it is trained: there is nothing to sync
    # a box at all is worth a little; a formula that hangs is killed, and counts nothing
    rewards = RewardGroup(
        {"right": "MathReward", "boxed": "GSM8KFormatReward"}, weights={"boxed": 0.1}, on_error="zero", time_limit=30
    )
    advantage = GRPOAdvantage()

    loader = load(model_id, prompts * steps, prompts)
    for step, batch in zip(range(1, steps + 1), loader, strict=False):
        params = SamplingParams(max_tokens=max_tokens, num_samples=group, logprobs=1, seed=step)
        drawn = [sequence for response in sampler.sample(batch, params) for sequence in response.sequences]
        rows = [sequence.new_input_feature for sequence in drawn]
        scores = rewards.score(rows)
        model.forward_backward(
            inputs=rows,
            old_logps=[[pairs[0][1] for pairs in sequence.logprobs] for sequence in drawn],
            advantages=advantage(scores.total, num_generations=group),
            micro_batch_size=group,
        )
        model.clip_grad_and_step()
        sampler.reset_prefix_cache()
        numbers = model.calculate_metric(is_training=True)
        right = sum(scores.by_name["right"]) / len(rows)
        reward = sum(scores.total) / len(rows)
        moved = numbers["approx_kl"]
        print(f"step {step}/{steps}: reward {reward:.3f}, right {right:.3f}, moved {moved:.5f}", flush=True)
    print("saved:", model.save("grpo-math"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-id", default=MODEL)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-5)
    arguments = parser.parse_args()
    train(arguments.model_id, arguments.steps, arguments.prompts, arguments.group, arguments.max_tokens, arguments.lr)

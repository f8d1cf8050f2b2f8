"""GRPO on a service: answers to sums are rewarded for the right number, and for saying little else.

Every step saves the adapter for sampling, samples from it, scores the answers here, and trains on them.

python examples/client/short_math_grpo.py --url http://127.0.0.1:8000 --key tml-...
"""

from random import Random

from arguments import arguments, served_model
from peft import LoraConfig

from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler


def problem(random):
    """Return a prompt and its answer."""
    a, b = random.randint(2, 9), random.randint(2, 9)
    content = f"What is {a} + {b}? Answer with the number only."
    return {"messages": [{"role": "user", "content": content}]}, str(a + b)


def reward(text, answer):
    """1 for the right number, and up to 1 for the share of digits in the text."""
    return float(answer in text.split()) + sum(letter.isdigit() for letter in text) / max(len(text), 1)


def train(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    model_id = served_model(client, options.model)
    model = MultiLoraTransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), seed=0)
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_optimizer("AdamW", lr=options.lr)
    model.add_metric("GRPOMetric", is_training=True)
    sampler = vLLMSampler(model_id=model_id)
    sampler.set_template("Template")
    advantage, random = GRPOAdvantage(), Random(0)

    for step in range(1, options.steps + 1):
        weights = model.save(f"policy-{step}", is_sampler=True, ttl_seconds=3600).twinkle_path
        prompts, answers = zip(*[problem(random) for _ in range(options.prompts)], strict=True)
        params = SamplingParams(max_tokens=options.max_tokens, num_samples=options.group, logprobs=1, seed=step)
        responses = sampler.sample(list(prompts), params, adapter_uri=weights)
        drawn = [(one, answer) for each, answer in zip(responses, answers, strict=True) for one in each.sequences]
        rewards = [reward(one.decoded or "", answer) for one, answer in drawn]
        model.forward_backward(
            inputs=responses,
            old_logps=[[pairs[0][1] for pairs in one.logprobs] for one, _ in drawn],
            advantages=advantage(rewards, num_generations=options.group).tolist(),
        )
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        mean = sum(rewards) / len(rewards)
        norm = numbers["grad_norm"]
        print(f"step {step}/{options.steps}: reward {mean:.4f}, gradient norm {norm:.4f}", flush=True)
    print("saved:", model.save("grpo", save_optimizer=True).twinkle_path)
    client.close()


if __name__ == "__main__":
    train(arguments(__doc__, steps=20, prompts=2, group=8, max_tokens=16, lr=1e-4))

"""GRPO with the Tinker SDK: sample, score the answers here, and train with `importance_sampling`.

python examples/client/tinker_grpo.py --url http://127.0.0.1:8000 --key tml-...
"""

from random import Random

from arguments import arguments, tinker_model
from short_math_grpo import problem, reward

from twinkle import init_tinker_client
from twinkle.advantage import GRPOAdvantage
from twinkle.template import Template


def datum_of(prompt, sequence, advantage):
    """Return a row: the tokens of the prompt have advantage 0, so only the answer is trained."""
    from tinker import Datum, ModelInput

    before = len(prompt) - 1
    tokens = [*prompt, *sequence.tokens]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def train(options):
    init_tinker_client(options.url, options.key)  # before the SDK is imported
    from tinker import AdamParams, ModelInput, SamplingParams, ServiceClient

    service = ServiceClient()
    model_id = tinker_model(options.model)
    training = service.create_lora_training_client(base_model=model_id, rank=8, seed=0).result()
    tokenizer = training.get_tokenizer()
    template, advantage, random = Template(model_id=model_id), GRPOAdvantage(), Random(0)
    for step in range(1, options.steps + 1):
        sampling = training.save_weights_and_get_sampling_client().result()
        params = SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=step)
        data, rewards = [], []
        for prompt, answer in [problem(random) for _ in range(options.prompts)]:
            tokens = list(template.encode(prompt, add_generation_prompt=True)["input_ids"])
            drawn = sampling.sample(ModelInput.from_ints(tokens), options.group, params).result().sequences
            scores = [reward(tokenizer.decode(one.tokens, skip_special_tokens=True), answer) for one in drawn]
            advantages = advantage(scores, num_generations=options.group).tolist()
            data += [datum_of(tokens, one, value) for one, value in zip(drawn, advantages, strict=True)]
            rewards += scores
        passed = training.forward_backward(data, "importance_sampling")
        training.optim_step(AdamParams(learning_rate=options.lr)).result()
        passed.result()
        print(f"step {step}/{options.steps}: reward {sum(rewards) / len(rewards):.4f}", flush=True)
    print("saved:", training.save_state("grpo").result().path)
    service.close("success").result()


if __name__ == "__main__":
    train(arguments(__doc__, steps=20, prompts=2, group=8, max_tokens=16, lr=1e-4))

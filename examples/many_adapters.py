"""Three tenants train their own adapters on one model, in one pass: by imitation, by preference and by reward.

The first two losses fall; GRPO's says nothing, there the mean reward rises. Two minutes on one CPU core.

python examples/many_adapters.py
"""

from twinkle.data_format import SamplingParams
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import TorchSampler
from twinkle.template import Template

MODEL, STEPS, GROUP = "builtin://smollm2-135m-instruct", 20, 8
ANA, BEN, CLEO = "imitates", "prefers", "is-rewarded"
QUESTIONS = ["Who are you?", "What is 3 + 4?", "Name a colour.", "Where is Rome?"]


def talk(question, answer=None):
    user = {"role": "user", "content": question}
    return {"messages": [user] if answer is None else [user, {"role": "assistant", "content": answer}]}


def train():
    template = Template(model_id=MODEL)
    model = MultiLoraTransformersModel(model_id=MODEL)
    kinds = (ANA, 16, "CrossEntropyLoss", {}), (BEN, 8, "DPOLoss", {"sft_weight": 0.3}), (CLEO, 8, "GRPOLoss", {})
    for name, rank, loss, options in kinds:
        model.add_adapter_to_model(name, {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}, seed=1)
        model.set_loss(loss, adapter_name=name, **options)
        model.set_optimizer("AdamW", adapter_name=name, lr=4e-4)
    sampler = TorchSampler(model=model)  # shares the base model

    imitated = [template.encode(talk(q, "I am Glow, and I like that question.")) for q in QUESTIONS]
    pairs = [template.encode(talk(q, a)) for q in QUESTIONS for a in ("Arr, let me tell ye!", "I do not know.")]
    owners = [ANA] * len(imitated) + [BEN] * len(pairs) + [CLEO] * GROUP
    none = [None] * len(imitated + pairs)
    for step in range(STEPS):
        params = SamplingParams(max_tokens=24, num_samples=GROUP, logprobs=1, seed=step)
        [response] = sampler.sample([talk(QUESTIONS[step % 4])], params, adapter_name=CLEO)
        drawn = response.sequences
        rewards = [-len(sequence.decoded) / 20 for sequence in drawn]  # short is good; in units of 20 characters
        mean = sum(rewards) / GROUP
        outputs = model.forward_backward(
            inputs=imitated + pairs + [sequence.new_input_feature for sequence in drawn],
            adapter_name=owners,
            ref_logps=[None] * len(imitated) + ["base"] * len(pairs) + [None] * GROUP,
            advantages=none + [reward - mean for reward in rewards],
            old_logps=none + [[token[0][1] for token in sequence.logprobs] for sequence in drawn],
        )
        model.clip_grad_and_step(adapter_name=[ANA, BEN, CLEO])
        losses = {owner: f"{output['loss']:.3f}" for owner, output in zip(owners, outputs, strict=True)}
        print(f"step {step + 1}/{STEPS}: {losses}, mean reward {mean:.2f}", flush=True)

    answers = sampler.sample([talk(QUESTIONS[0])] * 4, {"max_tokens": 24, "temperature": 0}, [None, ANA, BEN, CLEO])
    for name, answer in zip(["the base", ANA, BEN, CLEO], answers, strict=True):
        print(f"{name}: {answer.sequences[0].decoded}")


if __name__ == "__main__":
    train()

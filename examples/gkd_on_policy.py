"""On-policy distillation: the student answers, and learns what its teacher thinks of each word of that answer.

python examples/gkd_on_policy.py

The student is the teacher without every second layer. Several minutes on two CPU cores.
"""

import argparse

from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

MODEL = "builtin://smollm2-135m-instruct"


def load(model_id, split, batch_size, size):
    dataset = Dataset(DatasetMeta("builtin://arithmetic", split=split), size=size, language="en", difficulty=[1, 2])
    dataset.map("QuestionProcessor")
    dataset.set_template("Template", model_id=model_id, max_length=256)
    dataset.encode(add_generation_prompt=True)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def halved(model_id):
    """Save the model without every second layer, as the student to begin with."""
    model = TransformersModel(model_id=model_id, mixed_precision="no")
    module = model.model
    module.model.layers = module.model.layers[::2]
    module.config.num_hidden_layers = len(module.model.layers)
    return model.save("student")


def train(teacher_id, steps, batch_size, max_tokens, beta, lr):
    loader, held_out = load(teacher_id, "train", batch_size, batch_size * steps), load(teacher_id, "test", 8, 16)
    teacher = TransformersModel(model_id=teacher_id)
    student = TransformersModel(model_id=halved(teacher_id))
    student.set_template("Template", max_length=256)
    student.set_loss("GKDLoss", beta=beta)
    student.set_optimizer("AdamW", lr=lr)
    sampler = TorchSampler(model=student)  # samples from the very weights that are trained

    def answers(prompts, seed):
        """Return what the student says to each prompt, as rows whose sampled tokens are trained."""
        sampler.reset_prefix_cache()
        responses = sampler.sample(prompts, SamplingParams(max_tokens=max_tokens, seed=seed))
        rows = [response.sequences[0].new_input_feature for response in responses]
        return [row for row in rows if row is not None]  # an answer without a token teaches nothing

    def evaluate(when):
        for prompts in held_out:
            rows = answers(prompts, seed=0)
            teacher_logits = teacher.forward_only(inputs=rows, return_logits=True)["logits"]
            student.forward_only(inputs=rows, return_logits=True)
            student.calculate_loss(teacher_logits=teacher_logits)
        print(f"held out, {when}: divergence {student.calculate_metric(is_training=False)['loss']:.3f}", flush=True)

    evaluate("before")
    for step, prompts in enumerate(loader, 1):
        rows = answers(prompts, seed=step)
        teacher_logits = teacher.forward_only(inputs=rows, return_logits=True)["logits"]
        student.forward_backward(inputs=rows, teacher_logits=teacher_logits, micro_batch_size=4)
        student.clip_grad_and_step()
        numbers = student.calculate_metric(is_training=True)
        print(f"step {step}/{steps}: divergence {numbers['loss']:.3f}", flush=True)
    evaluate("after")
    print("saved:", student.save("gkd-on-policy"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher_id", default=MODEL)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--beta", type=float, default=1.0, help="0: KL(teacher, student), 1: the reverse, else between")
    parser.add_argument("--lr", type=float, default=1e-4)
    train(**vars(parser.parse_args()))

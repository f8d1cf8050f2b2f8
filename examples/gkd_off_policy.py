"""Off-policy distillation: a student with half of the layers learns from what its teacher thinks of given answers.

python examples/gkd_off_policy.py

The teacher is a sampler that scores rows and sends its most probable tokens alone; it could be on another machine.
Several minutes on two CPU cores.
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
    dataset.set_template("Template", model_id=model_id, max_length=256)
    dataset.encode()
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def halved(model_id):
    """Save the model without every second layer, as the student to begin with."""
    model = TransformersModel(model_id=model_id, mixed_precision="no")
    module = model.model
    module.model.layers = module.model.layers[::2]
    module.config.num_hidden_layers = len(module.model.layers)
    return model.save("student")


def most_probable(teacher, batch, k):
    """Return the teacher's k most probable tokens at each place of each row, as arguments of the loss."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=k)
    logprobs, tokens = [], []
    for response in teacher.sample(batch, params):
        # what is said of token t stands at place t - 1, which predicts it; the last place predicts nothing
        places = [*response.topk_prompt_logprobs[1:], response.topk_prompt_logprobs[-1]]
        logprobs.append([[logprob for _, logprob in place[:k]] for place in places])
        tokens.append([[token for token, _ in place[:k]] for place in places])
    return {"teacher_topk_logprobs": logprobs, "teacher_topk_indices": tokens}


def train(teacher_id, steps, batch_size, topk, beta, lr):
    loader, held_out = load(teacher_id, "train", batch_size, batch_size * steps), load(teacher_id, "test", 8, 16)
    teacher = TorchSampler(model_id=teacher_id)
    student = TransformersModel(model_id=halved(teacher_id))
    student.set_loss("GKDLoss", beta=beta)
    student.set_optimizer("AdamW", lr=lr)

    def evaluate(when):
        for batch in held_out:
            student.forward_only(inputs=batch, return_logits=True)
            student.calculate_loss(**most_probable(teacher, batch, topk))
        print(f"held out, {when}: divergence {student.calculate_metric(is_training=False)['loss']:.3f}", flush=True)

    evaluate("before")
    for step, batch in enumerate(loader, 1):
        student.forward_backward(inputs=batch, micro_batch_size=4, **most_probable(teacher, batch, topk))
        student.clip_grad_and_step()
        numbers = student.calculate_metric(is_training=True)
        print(f"step {step}/{steps}: divergence {numbers['loss']:.3f}", flush=True)
    evaluate("after")
    print("saved:", student.save("gkd-off-policy"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher_id", default=MODEL)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--topk", type=int, default=32, help="how many tokens the teacher sends for each place")
    parser.add_argument("--beta", type=float, default=0.0, help="0: KL(teacher, student), 1: the reverse, else between")
    parser.add_argument("--lr", type=float, default=1e-4)
    train(**vars(parser.parse_args()))

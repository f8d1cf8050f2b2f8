"""Top-k distillation with a loss of your own: a student adapter learns a teacher's most probable tokens.

The teacher is an adapter that first learns the answers. Both adapters live on the service; the loss is computed here.

python examples/client/topk_distillation.py --url http://127.0.0.1:8000 --key tml-...
"""

import numpy as np
import torch
from arguments import arguments, served_model
from peft import LoraConfig

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel


def load(model_id, data, rows, batch_size):
    dataset = Dataset(DatasetMeta(data, data_slice=range(rows)))
    dataset.map("SelfCognitionProcessor", init_args={"model_name": "Glow", "model_author": "the Twinkle founders"})
    dataset.set_template("Template", model_id=model_id, max_length=256)
    dataset.encode(batched=True)
    return DataLoader(dataset=dataset, batch_size=batch_size, shuffle=True)


def teacher_sets(model, batch, k):
    """Return the rows with the teacher's k most probable tokens as labels [T, k], and their shares of probability."""
    top = model.forward_only(inputs=batch, topk_logprobs=k, adapter_name="teacher")
    rows, wanted = [], []
    for row, tokens, logps in zip(batch, top["topk_indices"], top["topk_logprobs"], strict=True):
        trained = np.asarray(row["labels"]) != -100
        length = len(trained)
        labels = np.where(trained[:, None], tokens[:length], -100)
        rows.append({"input_ids": row["input_ids"], "labels": labels})
        wanted.append(torch.softmax(torch.tensor(logps[:length]), -1) * torch.tensor(trained)[:, None])
    return rows, wanted


def divergence(wanted):
    """Return the loss: the cross entropy with the teacher's k tokens, a mean over positions."""

    def loss(rows, logps):
        positions = sum((row["labels"] != -100).any(-1).sum() for row in rows)
        total = -sum((target * own).sum() for target, own in zip(wanted, logps, strict=True))
        mass = sum((own.detach().exp() * (target > 0)).sum() for target, own in zip(wanted, logps, strict=True))
        return total / positions, {"mass": mass / positions}

    return loss


def train(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    model_id = served_model(client, options.model)
    loader = load(model_id, options.data, options.rows, options.batch_size)
    model = MultiLoraTransformersModel(model_id=model_id)
    for name, rank in (("teacher", 16), ("student", 4)):
        config = LoraConfig(r=rank, target_modules="all-linear", rank_pattern={"down_proj": 2 * rank})
        model.add_adapter_to_model(name, config, seed=0)
        model.set_optimizer("AdamW", lr=options.lr, adapter_name=name)
    for _ in range(options.epochs):
        for batch in loader:
            model.forward_backward(inputs=batch, adapter_name="teacher")
            model.clip_grad_and_step(adapter_name="teacher")

    for epoch in range(options.epochs):
        for step, batch in enumerate(loader, 1):
            rows, wanted = teacher_sets(model, batch, options.k)
            output = model.forward_backward_custom(rows, divergence(wanted), adapter_name="student")
            model.clip_grad_and_step(adapter_name="student")
            mass = output["metrics"]["mass"]
            print(f"epoch {epoch + 1}, step {step}: loss {output['loss']:.4f}, mass {mass:.4f}", flush=True)
    print("saved:", model.save("student", is_sampler=True, adapter_name="student").twinkle_path)
    client.close()


if __name__ == "__main__":
    sizes = {"lr": 1e-3, "epochs": 2, "rows": 64, "batch_size": 4, "k": 16, "data": "builtin://self-cognition"}
    train(arguments(__doc__, **sizes))

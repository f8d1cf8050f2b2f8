"""Embeddings: questions that mean the same come close, others apart (InfoNCE over the whole batch, with LoRA).

python examples/embedding.py

A few minutes on two CPU cores. It ends with a search: which of the held-out questions means the same?
"""

import argparse

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.template import Template

MODEL = "builtin://smollm2-135m-instruct"


def load(template, split, batch_size, size):
    def grouped(columns):
        """Encode the texts of each group; the label 1 begins one: [anchor, positive, negative]."""
        groups = []
        for texts in zip(columns["anchor"], columns["positive"], columns["negative"], strict=True):
            rows = [template.encode({"messages": [{"role": "user", "content": text}]}) for text in texts]
            groups.append([{"input_ids": row["input_ids"], "labels": int(i == 0)} for i, row in enumerate(rows)])
        return {"group": groups}

    dataset = Dataset(DatasetMeta("builtin://arithmetic-paraphrases", split=split), size=size, language="en")
    dataset.map(grouped)
    # one row is one group, so that no shuffle and no batch tears it apart
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=True, collate_fn=lambda rows: [r for row in rows for r in row["group"]]
    )


def search(model, groups):
    """Return the share of anchors whose own positive is nearer than all other texts of the batch."""
    found, count = 0, 0
    for batch in groups:
        vectors = model.forward_only(inputs=batch, task="embedding")["embeddings"]
        anchors, texts = vectors[::3], [row for row in range(len(batch)) if row % 3]
        nearest = (anchors @ vectors[texts].T).argmax(1)
        found += sum(texts[near] == 3 * group + 1 for group, near in enumerate(nearest.tolist()))
        count += len(anchors)
    return found / count


def train(model_id, steps, batch_size, lr):
    template = Template(model_id=model_id, max_length=256)
    loader = load(template, "train", batch_size, batch_size * steps)
    held_out = load(template, "test", batch_size, 4 * batch_size)
    model = TransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"})
    model.set_loss("InfonceLoss", temperature=0.05, hard_negatives=1)
    model.set_optimizer("AdamW", lr=lr)
    model.add_metric("EmbeddingMetric", is_training=True)

    print(f"held out, before: {search(model, held_out):.2f} found", flush=True)
    for step, batch in enumerate(loader, 1):
        model.forward_backward(inputs=batch, task="embedding")
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        shown = ", ".join(f"{name} {numbers[name]:.3f}" for name in ("loss", "pos_sim", "neg_sim"))
        print(f"step {step}/{steps}: {shown}", flush=True)
    print(f"held out, after: {search(model, held_out):.2f} found")
    print("saved:", model.save("embedding"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_id", default=MODEL)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=16, help="groups a step")
    parser.add_argument("--lr", type=float, default=2e-4)
    train(**vars(parser.parse_args()))

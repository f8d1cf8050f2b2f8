"""Embeddings on a service (InfoNCE): questions that mean the same come close, all others move apart.

python examples/client/embedding.py --url http://127.0.0.1:8000 --key tml-...
"""

from arguments import arguments, served_model
from peft import LoraConfig

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.components import Template
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel

TEXTS = ("anchor", "positive", "negative")


def encoded(template, groups):
    """Return the rows of groups of texts; the label 1 begins a group: [anchor, positive, negative, anchor, ...]."""
    rows = []
    for group in groups:
        for name in TEXTS:
            row = template.encode({"messages": [{"role": "user", "content": group[name]}]})
            rows.append({"input_ids": row["input_ids"], "labels": int(name == "anchor")})
    return rows


def found(model, rows):
    """Return the share of anchors whose own positive is nearer than all other texts."""
    vectors = model.forward_only(inputs=rows, task="embedding")["embeddings"]
    texts = [row for row in range(len(rows)) if row % 3]
    nearest = (vectors[::3] @ vectors[texts].T).argmax(1)
    return sum(texts[near] == 3 * group + 1 for group, near in enumerate(nearest)) / len(nearest)


def train(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    model_id = served_model(client, options.model)
    template = Template("Template", model_id=model_id, max_length=256)
    size = options.steps * options.batch_size
    dataset = Dataset(DatasetMeta("builtin://arithmetic-paraphrases", split="train"), size=size, language="en")
    batches = [encoded(template, groups) for groups in DataLoader(dataset=dataset, batch_size=options.batch_size)]
    model = MultiLoraTransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), seed=0)
    model.set_loss("InfonceLoss", temperature=0.05, hard_negatives=1)
    model.set_optimizer("AdamW", lr=options.lr)

    print(f"before: {found(model, batches[0]):.2f} found")
    for epoch in range(options.epochs):
        for step, batch in enumerate(batches, 1):
            model.forward_backward(inputs=batch, task="embedding")
            model.clip_grad_and_step()
            numbers = model.calculate_metric(is_training=True)
            print(f"epoch {epoch + 1}, step {step}: loss {numbers['loss']:.4f}", flush=True)
    print(f"after: {found(model, batches[0]):.2f} found")
    print("saved:", model.save("embedding", is_sampler=True).twinkle_path)
    client.close()


if __name__ == "__main__":
    train(arguments(__doc__, steps=8, epochs=2, batch_size=8, lr=2e-4))

"""DPO of all parameters: right and worked answers are preferred to wrong ones, against a frozen copy of the model.

python examples/dpo.py
python examples/dpo.py --loss SimPOLoss --steps 20

SimPOLoss, CPOLoss and ORPOLoss need no reference. A few minutes on two CPU cores.
"""

import argparse

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

MODEL = "builtin://smollm2-135m-instruct"


def interleaved(pairs):
    """Return the rows of a batch of pairs as the losses want them: [chosen, rejected, chosen, rejected, ...]."""
    return [pair[side] for pair in pairs for side in ("positive", "negative")]


def load(model_id, batch_size, steps):
    # one row is one pair, so that no shuffle and no batch tears it apart
    dataset = Dataset(DatasetMeta("builtin://arithmetic-preferences"), size=batch_size * steps, language="en")
    dataset.map("PreferenceProcessor")
    dataset.set_template("Template", model_id=model_id, max_length=512)
    dataset.encode()
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=interleaved)


def train(model_id, loss, steps, batch_size, lr):
    loader = load(model_id, batch_size, steps)
    model = TransformersModel(model_id=model_id)
    model.set_loss(loss)
    model.set_optimizer("AdamW", lr=lr)
    reference = TransformersModel(model_id=model_id) if loss == "DPOLoss" else None

    for step, batch in enumerate(loader, 1):
        frozen = {"ref_outputs": reference.forward_only(inputs=batch)} if reference else {}
        model.forward_backward(inputs=batch, micro_batch_size=4, **frozen)
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        shown = ", ".join(f"{name} {numbers[name]:.3f}" for name in numbers if name == "loss" or "rewards/" in name)
        print(f"step {step}/{steps}: {shown}", flush=True)

    print("saved:", model.save("dpo"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_id", default=MODEL)
    parser.add_argument("--loss", default="DPOLoss", help="DPOLoss, SimPOLoss, CPOLoss or ORPOLoss")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=8, help="pairs a step")
    parser.add_argument("--lr", type=float, default=1e-6)
    train(**vars(parser.parse_args()))

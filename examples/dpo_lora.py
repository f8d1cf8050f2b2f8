"""DPO with LoRA: the reference is the model itself with its adapter switched off, so no second copy is needed.

python examples/dpo_lora.py

A few minutes on two CPU cores.
"""

import argparse

from peft import LoraConfig

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

MODEL = "builtin://smollm2-135m-instruct"


def interleaved(pairs):
    """Return the rows of a batch of pairs as the losses want them: [chosen, rejected, chosen, rejected, ...]."""
    return [pair[side] for pair in pairs for side in ("positive", "negative")]


def load(model_id, split, batch_size, size):
    # one row is one pair, so that no shuffle and no batch tears it apart
    dataset = Dataset(DatasetMeta("builtin://arithmetic-preferences", split=split), size=size, language="en")
    dataset.map("PreferenceProcessor")
    dataset.set_template("Template", model_id=model_id, max_length=512)
    dataset.encode()
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=interleaved)


def evaluate(model, loader):
    """Return the numbers over pairs whose problems were never trained on."""
    for batch in loader:
        reference = model.forward_only(inputs=batch, disable_lora=True)
        model.forward_only(inputs=batch)
        model.calculate_loss(ref_outputs=reference)
    return model.calculate_metric(is_training=False)


def train(model_id, loss_type, steps, batch_size, lr):
    loader = load(model_id, "train", batch_size, batch_size * steps)
    held_out = load(model_id, "test", batch_size, 2 * batch_size)
    model = TransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.set_loss("DPOLoss", beta=0.1, loss_type=loss_type)
    model.set_optimizer("AdamW", lr=lr)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=steps // 10, num_training_steps=steps)

    for step, batch in enumerate(loader, 1):
        reference = model.forward_only(inputs=batch, disable_lora=True)
        model.forward_backward(inputs=batch, ref_outputs=reference, micro_batch_size=4)
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        print(f"step {step}/{steps}: loss {numbers['loss']:.3f}, margin {numbers['rewards/margins']:.3f}", flush=True)

    numbers = evaluate(model, held_out)
    print(f"held out: margin {numbers['rewards/margins']:.3f}, accuracy {numbers['rewards/accuracies']:.2f}")
    print("saved:", model.save("dpo-lora"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_id", default=MODEL)
    parser.add_argument("--loss_type", default="sigmoid", help="sigmoid, hinge, ipo or kto_pair")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=8, help="pairs a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    train(**vars(parser.parse_args()))

"""DPO on a service: the reference is the same model with its adapter switched off, so no second model is needed.

python examples/client/dpo.py --url http://127.0.0.1:8000 --key tml-...
"""

from arguments import arguments, served_model
from peft import LoraConfig

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel


def load(model_id, pairs, batch_size):
    dataset = Dataset(DatasetMeta("builtin://arithmetic-preferences", split="train"), size=pairs, language="en")
    dataset.map("PreferenceProcessor")
    dataset.set_template("Template", model_id=model_id, max_length=512)
    dataset.encode()
    return DataLoader(dataset=dataset, batch_size=batch_size, shuffle=True)


def train(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    model_id = served_model(client, options.model)
    loader = load(model_id, options.steps * options.batch_size, options.batch_size)
    model = MultiLoraTransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), seed=0)
    model.set_loss("DPOLoss", beta=options.beta)
    model.set_optimizer("AdamW", lr=options.lr)
    model.add_metric("DPOMetric", beta=options.beta, is_training=True)

    for step, pairs in enumerate(loader, 1):
        # [chosen, rejected, chosen, rejected, ...], as the loss expects them
        batch = [pair[side] for pair in pairs for side in ("positive", "negative")]
        reference = model.forward_only(inputs=batch, disable_lora=True)
        model.forward_backward(inputs=batch, ref_outputs={"logps": reference["logps"]})
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        margin = numbers["rewards/margins"]
        print(f"step {step}/{options.steps}: loss {numbers['loss']:.4f}, margin {margin:.4f}", flush=True)
    print("saved:", model.save("dpo", is_sampler=True).twinkle_path)
    client.close()


if __name__ == "__main__":
    train(arguments(__doc__, steps=20, batch_size=4, lr=1e-4, beta=0.1))

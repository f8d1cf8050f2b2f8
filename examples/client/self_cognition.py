"""A model learns who it is: supervised fine-tuning of an adapter on a service, with data that the service prepares.

python examples/client/self_cognition.py --url http://127.0.0.1:8000 --key tml-...
"""

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


def newest_checkpoint(client):
    """Return the newest checkpoint for training of this key, or None."""
    for run in client.list_training_runs():
        if path := client.get_latest_checkpoint_path(run.training_run_id):
            return path
    return None


def train(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    model_id = served_model(client, options.model)
    loader = load(model_id, options.data, options.rows, options.batch_size)
    model = MultiLoraTransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=options.rank, target_modules="all-linear"), seed=0)
    model.set_loss("CrossEntropyLoss")
    model.set_optimizer("AdamW", lr=options.lr)
    if options.resume:
        path = newest_checkpoint(client) if options.resume == "newest" else options.resume
        print("resumed:", path, "at step", model.resume_from_checkpoint(path)["cur_step"])
    print(model.get_train_configs())

    for epoch in range(options.epochs):
        for step, batch in enumerate(loader, 1):
            model.forward_backward(inputs=batch)
            model.clip_grad_norm(1.0)
            model.step()
            model.zero_grad()
            numbers = model.calculate_metric(is_training=True)
            print(f"epoch {epoch + 1}, step {step}: loss {numbers['loss']:.4f}", flush=True)
        saved = model.save(f"epoch-{epoch + 1}", save_optimizer=True)
        print("saved:", saved.twinkle_path)
    print("for sampling:", model.save("final", is_sampler=True).twinkle_path)
    client.close()


if __name__ == "__main__":
    sizes = {"rank": 8, "lr": 1e-4, "epochs": 3, "rows": 64, "batch_size": 4}
    train(arguments(__doc__, data="builtin://self-cognition", resume=None, **sizes))

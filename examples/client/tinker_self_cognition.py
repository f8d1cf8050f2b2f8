"""A model learns who it is, with the Tinker SDK: data and template are here, the model is on the service.

python examples/client/tinker_self_cognition.py --url http://127.0.0.1:8000 --key tml-...
"""

from arguments import arguments, tinker_model

from twinkle import init_tinker_client
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import SelfCognitionProcessor
from twinkle.server.common import input_feature_to_datum


def load(model_id, rows, batch_size):
    dataset = Dataset(DatasetMeta("builtin://self-cognition", data_slice=range(rows)))
    dataset.map(SelfCognitionProcessor("Glow", "the Twinkle founders"))
    dataset.set_template("Template", model_id=model_id, max_length=256)
    dataset.encode(batched=True)
    return DataLoader(dataset=dataset, batch_size=batch_size)


def train(options):
    init_tinker_client(options.url, options.key)  # before the SDK is imported
    from tinker import AdamParams, ServiceClient

    service = ServiceClient()
    model_id = tinker_model(options.model)
    training = service.create_lora_training_client(base_model=model_id, rank=options.rank, seed=0).result()
    for epoch in range(options.epochs):
        for step, batch in enumerate(load(model_id, options.rows, options.batch_size), 1):
            data = [input_feature_to_datum(row) for row in batch]
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=options.lr))
            tokens = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in data)
            loss = passed.result().metrics["loss:sum"] / tokens
            stepped.result()
            print(f"epoch {epoch + 1}, step {step}: loss {loss:.4f}", flush=True)
        print("saved:", training.save_state(f"epoch-{epoch + 1}").result().path)
    service.close("success").result()


if __name__ == "__main__":
    train(arguments(__doc__, rank=16, lr=1e-4, epochs=3, rows=64, batch_size=8))

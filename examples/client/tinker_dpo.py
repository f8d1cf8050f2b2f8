"""DPO with the Tinker SDK: a custom loss, computed here from the log-probabilities that the service sends.

python examples/client/tinker_dpo.py --url http://127.0.0.1:8000 --key tml-...
"""

from arguments import arguments, tinker_model

from twinkle import init_tinker_client
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.server.common import input_feature_to_datum


def load(model_id, pairs, batch_size):
    dataset = Dataset(DatasetMeta("builtin://arithmetic-preferences", split="train"), size=pairs, language="en")
    dataset.map("PreferenceProcessor")
    dataset.set_template("Template", model_id=model_id, max_length=512)
    dataset.encode()
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def summed(datum, logprobs):
    """Return the log-probability of the answer of a row."""
    import torch

    weights = torch.tensor(datum.loss_fn_inputs["weights"].data)
    return (torch.as_tensor(logprobs) * weights).sum()


def dpo_loss(references, beta):
    """Return the loss for `forward_backward_custom`; rows are [chosen, rejected, chosen, rejected, ...]."""
    import torch

    def loss(data, logprobs):
        own = torch.stack([summed(datum, values) for datum, values in zip(data, logprobs, strict=True)])
        rewards = beta * (own - torch.stack(references))
        margins = rewards[::2] - rewards[1::2]
        value = -torch.nn.functional.logsigmoid(margins).mean()
        return value, {"loss": float(value.detach()), "margin": float(margins.detach().mean())}

    return loss


def train(options):
    init_tinker_client(options.url, options.key)  # before the SDK is imported
    from tinker import AdamParams, ServiceClient

    service = ServiceClient()
    model_id = tinker_model(options.model)
    training = service.create_lora_training_client(base_model=model_id, rank=8, seed=0).result()
    base = service.create_sampling_client(base_model=model_id).result()
    for step, pairs in enumerate(load(model_id, options.steps * options.batch_size, options.batch_size), 1):
        data = [input_feature_to_datum(pair[side]) for pair in pairs for side in ("positive", "negative")]
        references = [reference(base, datum) for datum in data]
        passed = training.forward_backward_custom(data, dpo_loss(references, options.beta)).result()
        training.optim_step(AdamParams(learning_rate=options.lr)).result()
        margin, loss = passed.metrics["margin"], passed.metrics["loss"]
        print(f"step {step}/{options.steps}: loss {loss:.4f}, margin {margin:.4f}", flush=True)
    print("saved:", training.save_state("dpo").result().path)
    service.close("success").result()


def reference(base, datum):
    """Return the log-probability of a row's answer under the base model."""
    import tinker

    targets = datum.loss_fn_inputs["target_tokens"].data
    tokens = [*datum.model_input.to_ints(), int(targets[-1])]
    logprobs = base.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    return summed(datum, logprobs[1:])


if __name__ == "__main__":
    train(arguments(__doc__, steps=20, batch_size=4, lr=1e-4, beta=0.1))

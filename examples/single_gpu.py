"""The simplest script: one process, one device (a GPU where there is one), every parameter trained.

python examples/single_gpu.py
"""

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel


def train():
    dataset = Dataset(dataset_meta=DatasetMeta("builtin://self-cognition"))
    dataset.set_template("Template", model_id="builtin://smollm2-135m-instruct")
    dataset.encode()

    dataloader = DataLoader(dataset=dataset, batch_size=8)
    model = TransformersModel(model_id="builtin://smollm2-135m-instruct")

    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()


if __name__ == "__main__":
    train()

"""The simplest script: one process, one device (a GPU where there is one), every parameter trained; minutes on a CPU.

python examples/single_gpu.py
"""

from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel


def train():
    dataset = Dataset(dataset_meta=DatasetMeta("builtin://self-cognition"))
    dataset.map("SelfCognitionProcessor", model_name="Glow", model_author="the Twinkle founders")
    dataset.set_template("Template", model_id="builtin://smollm2-135m-instruct")
    dataset.encode()

    dataloader = DataLoader(dataset=dataset, batch_size=8)
    model = TransformersModel(model_id="builtin://smollm2-135m-instruct")
    model.set_optimizer("AdamW", lr=1e-4)

    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        numbers = model.calculate_metric(is_training=True)
        print(f"step {numbers['iters']}/{len(dataloader)}: loss {numbers['loss']:.3f}", flush=True)

    print("saved:", model.save("single_gpu"))


if __name__ == "__main__":
    train()

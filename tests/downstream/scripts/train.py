"""Trains a tiny model with a loss by its name, and writes what happened as one line of JSON.

    python train.py FOLDER LOSS ARGUMENTS [SAMPLER]

The logits of the untrained model are kept, so that whoever asked can compute the first loss in another way.
"""

import json
import sys

import torch

from twinkle import Run, registry
from twinkle.model import TransformersModel
from twinkle.testing import tiny_model

ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 10], "labels": [10, -100]}]

folder, loss, arguments, *sampler = sys.argv[1:]
torch.manual_seed(0)
model = TransformersModel(model_id=str(tiny_model(f"{folder}/model")), mixed_precision="no")
model.set_loss(loss, **json.loads(arguments))
model.set_optimizer("AdamW", lr=3e-3)
with torch.no_grad():
    logps = [
        model.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)[place, label].item()
        for row in ROWS
        for place, label in enumerate(row["labels"])
        if label != -100
    ]
losses = []
with Run("downstream", root=folder) as run:
    for step in range(1, 9):
        losses.append(float(model.forward_backward(inputs=ROWS, micro_batch_size=1)["loss"]))
        model.clip_grad_and_step()
        run.log({"loss": losses[-1]}, step)
told = {"logps": logps, "losses": losses, "folder": str(run.folder)}
for name in [*sampler, *(["TorchSampler"] if sampler else [])]:
    (response,) = (
        registry()
        .build(name, "sampler", model=model)
        .sample([{"input_ids": [5, 6]}], {"max_tokens": 5, "temperature": 0.0, "logprobs": 1})
    )
    told[name] = [list(map(int, response.sequences[0].tokens)), response.sequences[0].logprobs]
print(json.dumps(told))

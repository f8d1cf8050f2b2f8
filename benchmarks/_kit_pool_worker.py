"""One side of `vs_twinkle_kit_pool.py`: the same script for both packages, which share their published names.

It is started once for each contestant, each with the interpreter of its own environment, and does one round (forward
and backward of every adapter, then clipping and update of every adapter) for every line that it reads.
"""

import json
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import torch
from _kit_worker import run_kit_on_cpu
from _pairs import peak_kib
from peft import LoraConfig

Batch = dict[str, list[dict[str, list[int]]]]


def main() -> None:
    """Build the adapters that the first line asks for; answer each further line by a round."""
    job = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job["kit"]:
        run_kit_on_cpu()
    import twinkle
    from twinkle.model import MultiLoraTransformersModel

    twinkle.initialize(mode="local")
    limits = {"max_loras": len(job["adapters"]), "max_r": job["rank"]}
    model = MultiLoraTransformersModel(model_id=job["model"], mixed_precision="no", **limits)
    for name, folder in job["adapters"].items():
        config = LoraConfig(
            r=job["rank"], lora_alpha=2 * job["rank"], target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model.add_adapter_to_model(name, config)
        model.set_loss("CrossEntropyLoss", adapter_name=name)
        model.set_processor("InputProcessor", adapter_name=name)
        model.set_optimizer("AdamW", lr=1e-3, weight_decay=0.0, adapter_name=name)
        model.load(folder, adapter_name=name)
    packages = ("torch", "transformers", "peft", *(["twinkle-kit"] if job["kit"] else []))
    answer({"versions": ", ".join(f"{name} {version(name)}" for name in packages)})
    train, update = (train_each, update_each) if job["kit"] else (train_all, update_all)
    for line in sys.stdin:
        batch = json.loads(line)
        start = time.process_time()
        losses = train(model, batch)
        between = time.process_time()
        update(model, list(batch))
        end = time.process_time()
        answer({"train": between - start, "update": end - between, "losses": losses, "peak": peak_kib()})


def train_each(model: Any, batch: Batch) -> list[float]:
    """Call forward and backward adapter after adapter; return the loss of each."""
    return [float(model.forward_backward(inputs=rows, adapter_name=name)["loss"]) for name, rows in batch.items()]


def train_all(model: Any, batch: Batch) -> list[float]:
    """Call forward and backward of all rows once; return the loss of each adapter."""
    rows = [row for mine in batch.values() for row in mine]
    owners = [name for name, mine in batch.items() for _ in mine]
    outputs = model.forward_backward(inputs=rows, adapter_name=owners)
    return list({name: float(output["loss"]) for name, output in zip(owners, outputs, strict=True)}.values())


def update_each(model: Any, names: list[str]) -> None:
    """Clip and update adapter after adapter."""
    for name in names:
        model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=name)


def update_all(model: Any, names: list[str]) -> None:
    """Clip and update all adapters in one call."""
    model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=names)


def answer(values: dict[str, Any]) -> None:
    """Write one line to whoever asked."""
    OUT.write(json.dumps(values) + "\n")
    OUT.flush()


if __name__ == "__main__":
    # What libraries print must not get between the answers.
    OUT, sys.stdout = sys.stdout, sys.stderr
    main()

"""One side of `vs_twinkle_kit.py`: the same script for both packages, which share their published names.

It is started once for each contestant, each with the interpreter of its own environment, and makes one step for every
line that it reads.
"""

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _pairs import peak_kib
from peft import LoraConfig
from safetensors.torch import load_file


def main() -> None:
    """Build the model that the first line asks for; answer each further line by a step."""
    job = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job["kit"]:
        run_kit_on_cpu()
    import twinkle
    from twinkle.model import TransformersModel

    twinkle.initialize(mode="local")
    model = TransformersModel(model_id=job["model"], mixed_precision=job["precision"])
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model.add_adapter_to_model("default", adapter)
    model.set_loss("CrossEntropyLoss")
    model.set_processor("InputProcessor", **job["processor"])
    model.set_optimizer("AdamW", lr=1e-4, weight_decay=0.0)
    copy_weights(model.model, Path(job["adapter"]))
    packages = ("torch", "transformers", "peft", *(["twinkle-kit"] if job["kit"] else []))
    answer({"versions": ", ".join(f"{name} {version(name)}" for name in packages)})
    for line in sys.stdin:
        batch = json.loads(line)
        start = time.process_time()
        loss = float(model.forward_backward(inputs=batch)["loss"])
        model.clip_grad_and_step(max_grad_norm=1.0)
        answer({"seconds": time.process_time() - start, "loss": loss, "peak": peak_kib()})


def run_kit_on_cpu() -> None:
    """Tell twinkle-kit, which knows no CPU, that its GPU is one."""
    from twinkle.utils.platforms import gpu

    gpu.GPU.device_prefix = staticmethod(lambda: "cpu")
    gpu.GPU.get_local_device = staticmethod(lambda idx=None, **kwargs: "cpu")
    gpu.GPU.device_backend = staticmethod(lambda platform=None: "gloo")


def copy_weights(model: Any, file: Path) -> None:
    """Give the adapter the numbers in `file`."""
    wanted = load_file(file)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if found.keys() != wanted.keys():
        raise RuntimeError(f"the sides train different parameters: {sorted(found.keys() ^ wanted.keys())[:4]}")
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(wanted[name])


def answer(values: dict[str, Any]) -> None:
    """Write one line to whoever asked."""
    OUT.write(json.dumps(values) + "\n")
    OUT.flush()


if __name__ == "__main__":
    # What libraries print must not get between the answers.
    OUT, sys.stdout = sys.stdout, sys.stderr
    main()

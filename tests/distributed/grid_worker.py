"""One rank of the grid: makes one SGD step in every cell and writes how far each update is from the reference."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

import twinkle
from twinkle import DeviceMesh, Platform
from twinkle.data_format import LossOutput
from twinkle.loss import Loss
from twinkle_transformers.model import TransformersModel

LENGTHS = (5, 31, 12, 7, 23, 3, 17, 9, 26)
LAYOUTS = ("padded", "padding-free", "packed")
PLACINGS = ("DDP", "FSDP2")
LOSSES = ("token-mean", "sequence-mean")
TRAINED = ("LoRA", "full")


class SequenceMean(Loss):
    """A mean over rows of means over tokens: its denominator counts rows."""

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        mask = (inputs["labels"] != -100).to(outputs["logps"].dtype)
        means = -(outputs["logps"] * mask).sum(-1) / mask.sum(-1)
        return LossOutput(means.sum(), means.shape[0])


def rows() -> list[dict[str, Any]]:
    """Rows of uneven lengths, their first third not trained."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        ids = torch.randint(3, 256, (length,), generator=generator).tolist()
        labels = [*ids[1:], -100]
        labels[: length // 3] = [-100] * (length // 3)
        made.append({"input_ids": ids, "labels": labels, "position_ids": list(range(length))})
    return made


def pack(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Concatenate neighbours two by two."""
    pairs = [group[start : start + 2] for start in range(0, len(group), 2)]
    return [{key: [value for row in pair for value in row[key]] for key in pair[0]} for pair in pairs]


def start(model: Any, lora: bool) -> Any:
    """Add the adapter (with a B that is not zero) where one is trained."""
    if lora:
        for name, parameter in model.named_parameters():
            if "lora_" in name and not parameter.is_meta:
                seed = sum(map(ord, name))
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.data = (noise * 0.05).to(parameter.dtype)
    return model


def adapter(dropout: float = 0.0) -> peft.LoraConfig:
    """Return the adapter's configuration."""
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")


def reference(folder: str, lora: bool, by_row: bool) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean over all rows."""
    return reference_with_loss(folder, lora, by_row)[0]


def reference_with_loss(folder: str, lora: bool, by_row: bool) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradient and loss: plain torch, float64, one row at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = start(peft.get_peft_model(model, adapter()) if lora else model, lora).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows():
        log_p = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        labels = torch.tensor(row["labels"])
        mask = labels != -100
        nll = -log_p[mask].gather(-1, labels[mask][:, None]).sum()
        total = total + (nll / mask.sum() if by_row else nll)
        count += 1 if by_row else int(mask.sum())
    (total / count).backward()
    grads = {_plain(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, float(total.detach() / count)


def update(folder: str, mesh: DeviceMesh, layout: str, steps: int, micro: int | None, loss: str, lora: bool) -> Any:
    """Return weights before minus weights after one SGD step with lr 1, by name."""
    model = TransformersModel(model_id=folder, mixed_precision="no", device_mesh=mesh)
    if model.parallel.in_lockstep != mesh.has_dim("fsdp"):
        raise AssertionError(f"{mesh}: the parameters do not lie as the mesh says")
    if lora:
        model.add_adapter_to_model("default", adapter(), gradient_accumulation_steps=steps)
        start(model.model, lora)
    if loss == "sequence-mean":
        model.set_loss(SequenceMean)
    if layout == "padding-free":
        model.set_processor("InputProcessor", padding_free=True)
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    data = rows()
    calls = [data] if steps == 1 else [data[:5], data[5:]]
    for call in calls:
        own = call[mesh.get_slice(len(call))]
        model.forward_backward(inputs=pack(own) if layout == "packed" else own, micro_batch_size=micro)
        model.clip_grad_and_step(max_grad_norm=0.0, gradient_accumulation_steps=steps)
    return {_plain(name): before[name] - tensor for name, tensor in model.get_state_dict().items()}


def _plain(name: str) -> str:
    return name.replace(".default", "")


def main(folder: str, result: str) -> None:
    """Go through the grid on this rank; the first writes the errors."""
    torch.set_num_threads(1)
    world = Platform.get_world_size()
    meshes = {"DDP": DeviceMesh.from_sizes(dp_size=world), "FSDP2": DeviceMesh.from_sizes(fsdp_size=world)}
    twinkle.initialize(mode="local", global_device_mesh=meshes["DDP"])
    wanted = {(t, loss): reference(folder, t == "LoRA", loss == "sequence-mean") for t in TRAINED for loss in LOSSES}
    errors = {}
    for placing, layout, steps, micro in itertools.product(PLACINGS, LAYOUTS, (1, 2), (None, 1)):
        for trained, loss in itertools.product(TRAINED, LOSSES):
            got = update(folder, meshes[placing], layout, steps, micro, loss, trained == "LoRA")
            want = wanted[trained, loss]
            size = sum(float(want[name].square().sum()) for name in want) ** 0.5
            off = sum(float((got[name].double() - want[name]).square().sum()) for name in want) ** 0.5
            cell = f"{world} {placing} {layout} x{steps} {'whole' if micro is None else 'micro'} {trained} {loss}"
            errors[cell] = off / size
    if twinkle.is_master():
        Path(result).write_text(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])

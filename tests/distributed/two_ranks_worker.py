"""One of several ranks: makes the scenario named on the command line and writes what it saw."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comparisons
import torch
from grid_worker import adapter, rows, start
from loss_steps import CASES, SHARES, loss_step

import twinkle
from twinkle import DeviceMesh, Platform, registry
from twinkle.errors import RankError
from twinkle_transformers.model import TransformersModel

SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {}


def scenario(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """Make a function callable from the command line by its name."""
    SCENARIOS[function.__name__] = function
    return function


def meshes() -> dict[str, DeviceMesh]:
    """Return the ways in which these ranks can share a model."""
    world = Platform.get_world_size()
    found = {"DDP": DeviceMesh.from_sizes(dp_size=world), "FSDP2": DeviceMesh.from_sizes(fsdp_size=world)}
    if world == 4:
        found["HSDP"] = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2)
    return found


def build(
    folder: Path,
    mesh: DeviceMesh,
    *,
    lora: bool = True,
    optimizer: str = "AdamW",
    lr: float = 1e-2,
    dropout: float = 0.0,
    **options: Any,
) -> Any:
    """Return a model that is ready for its first step."""
    model = TransformersModel(model_id=str(folder / "model"), device_mesh=mesh, **{"mixed_precision": "no", **options})
    if lora:
        model.add_adapter_to_model("default", adapter(dropout))
        start(model.model, lora)
    model.set_optimizer(optimizer, lr=lr, **({} if optimizer == "Rprop" else {"weight_decay": 0.0}))
    return model


def own(mesh: DeviceMesh, data: list[Any]) -> list[Any]:
    """Return this rank's rows."""
    return data[mesh.get_slice(len(data))]


def train(model: Any, mesh: DeviceMesh, steps: int) -> None:
    """Make some steps on rotations of the same rows."""
    data = rows()
    for step in range(steps):
        model.forward_backward(inputs=own(mesh, data[step:] + data[:step]))
        model.clip_grad_and_step()


def weights(model: Any) -> dict[str, list[float]]:
    """Return whole weights as numbers that survive JSON bit for bit."""
    return {name: tensor.double().flatten().tolist() for name, tensor in model.get_state_dict().items()}


@scenario
def norms(folder: Path) -> dict[str, Any]:
    """Return the clipped norm, the weights and the metrics of one step, for each way."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        for kind in ("LoRA", "full"):
            model = build(folder, mesh, lora=kind == "LoRA", optimizer="SGD", lr=8.0)
            before = weights(model)
            model.forward_backward(inputs=own(mesh, rows()))
            norm = model.clip_grad_norm(max_grad_norm=0.05)
            model.step()
            seen[f"{name} {kind}"] = {
                "norm": norm,
                "metrics": model.calculate_metric(is_training=True),
                "update": {n: [a - b for a, b in zip(before[n], w, strict=True)] for n, w in weights(model).items()},
            }
    return seen


@scenario
def parts(folder: Path) -> dict[str, Any]:
    """Train the head alone, given as parameters before the model is placed."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        model = TransformersModel(model_id=str(folder / "model"), device_mesh=mesh, mixed_precision="no")
        head = model.model.get_input_embeddings().weight
        model.set_optimizer("SGD", lr=1.0, weight_decay=0.0, params=[{"params": [head], "lr": 0.5}])
        train(model, mesh, 2)
        left = [n for n, parameter in model.model.named_parameters() if parameter.grad is not None]
        seen[name] = {"weights": weights(model), "left": left}
    return seen


@scenario
def options(folder: Path) -> dict[str, Any]:
    """Return the weights after two steps under options of FSDP2; all must be those of plain FSDP2."""
    mesh = meshes()["FSDP2"]
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "loaded by the first rank": {"memory_efficient_init": True},
        "cpu_offload": {"fsdp_config": {"cpu_offload": True}},
        "kept after the forward": {"fsdp_config": {"reshard_after_forward": False}},
        "other blocks": {"fsdp_config": {"transformer_cls_names_to_wrap": ["LlamaMLP", "LlamaAttention"]}},
        "recomputed": {"gradient_checkpointing": True},
        "native_fsdp": {"strategy": "native_fsdp"},
    }
    seen: dict[str, Any] = {}
    for lora in (True, False):
        for name, given in settings.items():
            model = build(folder, mesh, lora=lora, **given)
            train(model, mesh, 2)
            seen[f"{name}, {'LoRA' if lora else 'full'}"] = weights(model)
    return seen


@scenario
def precision(folder: Path) -> dict[str, Any]:
    """Return losses under mixed precision, for each way."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        for dtype in ("bf16", "fp16"):
            scaler = {"grad_scaler_config": {"init_scale": 64.0}} if dtype == "fp16" else {}
            model = build(folder, mesh, lora=False, mixed_precision=dtype, **scaler)
            losses = []
            for _ in range(3):
                model.forward_backward(inputs=own(mesh, rows()))
                model.clip_grad_and_step()
                losses.append(model.calculate_metric(is_training=True)["loss"])
            seen[f"{name} {dtype}"] = losses
    return seen


@scenario
def checkpoints(folder: Path) -> dict[str, Any]:
    """Save after two steps, make two more; resume in a new model and make the same two."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        for kind in ("LoRA", "full"):
            cell = f"{name} {kind}"
            model = build(folder, mesh, lora=kind == "LoRA")
            train(model, mesh, 2)
            path = model.save(cell.replace(" ", "-"), output_dir=str(folder / "saved"), save_optimizer=True)
            seen[f"{cell} at the checkpoint"] = weights(model)
            train(model, mesh, 2)
            again = build(folder, mesh, lora=kind == "LoRA")
            progress = again.resume_from_checkpoint(path)
            train(again, mesh, 2)
            seen[cell] = {"went on": weights(model), "resumed": weights(again), "cur_step": progress["cur_step"]}
    return seen


@scenario
def resumed(folder: Path) -> dict[str, Any]:
    """Resume the checkpoints of `checkpoints` on this number of ranks: weights and optimizer state as they lie."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        for kind in ("LoRA", "full"):
            model = build(folder, mesh, lora=kind == "LoRA")
            model.resume_from_checkpoint(str(folder / "saved" / f"{name}-{kind}"))
            seen[f"{name} {kind}"] = weights(model)
            model.save(f"again-{name}-{kind}", output_dir=str(folder / "saved"), save_optimizer=True)
    return seen


@scenario
def unfinished(folder: Path) -> dict[str, Any]:
    """Save within an accumulation and go on; the step is the one of the model that was not interrupted."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        models = []
        for _ in range(2):
            model = build(folder, mesh)
            if not models:
                model.forward_backward(inputs=own(mesh, rows()[:5]))
                path = model.save(f"part-{name}", output_dir=str(folder / "saved"), save_optimizer=True)
            else:
                model.resume_from_checkpoint(path)
            model.forward_backward(inputs=own(mesh, rows()[5:]))
            model.clip_grad_and_step(flush=True, gradient_accumulation_steps=2)
            models.append(weights(model))
        seen[name] = models
    return seen


@scenario
def no_rows(folder: Path) -> dict[str, Any]:
    """The last rank has no rows: the step is that of the other one's."""
    seen: dict[str, Any] = {}
    last = Platform.get_rank() == Platform.get_world_size() - 1
    for name, mesh in meshes().items():
        model = build(folder, mesh)
        model.forward_backward(inputs=[] if last else rows(), micro_batch_size=4)
        model.clip_grad_and_step()
        model.forward_only(inputs=[] if last else rows()[:2])
        model.calculate_loss()
        seen[name] = {"weights": weights(model), "eval": model.calculate_metric(is_training=False)}
    return seen


@scenario
def nonfinite(folder: Path) -> dict[str, Any]:
    """The last rank's loss is NaN and left out, once."""
    seen: dict[str, Any] = {}
    last = Platform.get_rank() == Platform.get_world_size() - 1

    for name, mesh in meshes().items():
        model = build(folder, mesh, on_nonfinite="skip")

        def broken(inputs: Any, outputs: Any) -> Any:
            mask = inputs["labels"] != -100
            return {"loss": -(outputs["logps"] * (float("nan") if last else 1.0)).sum(), "num_tokens": mask.sum()}

        model.set_loss(broken)
        model.forward_backward(inputs=own(mesh, rows()))
        model.set_loss("CrossEntropyLoss")
        model.forward_backward(inputs=own(mesh, rows()))
        model.clip_grad_and_step()
        seen[name] = model.calculate_metric(is_training=True)
    return seen


@scenario
def losses(folder: Path) -> dict[str, Any]:
    """Make a step of each loss, on fewer rows (and micro-batches) than the other rank."""
    share, ways = SHARES[Platform.get_rank()], meshes()
    return {f"{way} {loss}": loss_step(folder, ways[way], share, loss) for way, loss in CASES}


@scenario
def dropout(folder: Path) -> dict[str, Any]:
    """Return the log-probabilities of one row under dropout, twice."""
    seen: dict[str, Any] = {}
    for name, mesh in meshes().items():
        model = build(folder, mesh, dropout=0.5)
        passes = [model.forward(inputs=rows()[:1])["logps"].flatten().tolist() for _ in range(2)]
        seen[name] = passes
    return seen


@scenario
def optimizers(folder: Path) -> dict[str, Any]:
    """Train three steps with each optimizer, resume after the second and make the third again."""
    seen: dict[str, Any] = {}
    names = [name for name in registry().names("optimizer") if name not in ("LBFGS", "SparseAdam")]
    for optimizer in names:
        for name, mesh in meshes().items():
            try:
                model = build(folder, mesh, optimizer=optimizer, lr=1e-3)
                train(model, mesh, 2)
                path = model.save(f"{optimizer}-{name}", output_dir=str(folder / "saved"), save_optimizer=True)
                train(model, mesh, 1)
                again = build(folder, mesh, optimizer=optimizer, lr=1e-3)
                again.resume_from_checkpoint(path)
                train(again, mesh, 1)
            except Exception as error:
                seen[f"{optimizer} {name}"] = {"refused": f"{type(error).__name__}: {error}"}
            else:
                seen[f"{optimizer} {name}"] = {"went on": weights(model), "resumed": weights(again)}
    return seen


@scenario
def apart(folder: Path) -> dict[str, Any]:
    """Ranks that make different calls are told so."""
    mesh = meshes()["DDP"]
    model = build(folder, mesh)
    model.forward_backward(inputs=own(mesh, rows()))
    try:
        if twinkle.is_master():
            model.save("alone", output_dir=str(folder / "saved"))
        else:
            model.clip_grad_and_step()
    except RankError as error:
        return {"message": str(error)}
    return {}


@scenario
def unequal(folder: Path) -> dict[str, Any]:
    """The first rank makes a step more than the others."""
    mesh = meshes()["DDP"]
    model = build(folder, mesh)
    train(model, mesh, 2 if twinkle.is_master() else 1)
    return {}


@scenario
def fast_paths(folder: Path) -> dict[str, Any]:
    """Return the norm of a step with and without shared prefixes, and what the first rank alone asked about them."""
    mesh = meshes()["FSDP2"]
    prompt = list(range(3, 43))
    data = [{"input_ids": ids, "labels": [-100] * 39 + ids[40:] + [-100]} for ids in (
        [*prompt, *range(number, number + 5)] for number in range(50, 58))]  # fmt: skip
    seen: dict[str, Any] = {"norms": [], "shared": []}
    for share in (False, True):
        model = build(folder, mesh, optimizer="SGD", lr=8.0, share_prefixes=share)
        if twinkle.is_master():  # as a recipe does, which writes down what was measured
            seen["paths"] = {found.path: found.exact for found in model.evidence()}
        model.forward_backward(inputs=own(mesh, data))
        seen["norms"].append(model.clip_grad_norm(1.0))
        seen["shared"].append(
            hasattr(model._passes.batch(model.optimizer_group["default"], own(mesh, data)), "lengths")
        )
    seen["same"] = {found.path: found.exact for found in model.evidence()}
    return seen


@scenario
def comparison(folder: Path) -> dict[str, Any]:
    """Compare rows and measure them over ranks with unequal shares."""
    return comparisons.compare()


@scenario
def killed(folder: Path) -> dict[str, Any]:
    """Train for ever; somebody will kill a rank."""
    mesh = meshes()["DDP"]
    model = build(folder, mesh)
    train(model, mesh, 1)
    Path(folder, f"pid-{Platform.get_rank()}").write_text(str(os.getpid()))
    while True:
        train(model, mesh, 1)


def main(name: str, folder: str) -> None:
    """Run a scenario; each rank writes what it saw."""
    torch.set_num_threads(1)
    twinkle.initialize(mode="local")
    for one in name.split(","):
        seen = SCENARIOS[one](Path(folder))
        world, rank = Platform.get_world_size(), Platform.get_rank()
        Path(folder, f"{one}-{world}-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One of two ranks that train several adapters, each with its own share of the rows."""

import sys
from pathlib import Path
from typing import Any

import torch
from pools import flat_of, lora, make_rows, open_pool

import twinkle
from twinkle import DeviceMesh, Platform
from twinkle.errors import Unsupported

NAMES = ("a", "b")


def rows_of(name: str, step: int) -> list[Any]:
    """Return all rows of an adapter, for all ranks together."""
    return make_rows(4, (9, 5, 12, 7), seed=step + 100 * NAMES.index(name))


def build(folder: Path, mesh: DeviceMesh | None, *, seeded: bool = True) -> Any:
    """Return a pool with two adapters."""
    model = open_pool(folder / "model", device_mesh=mesh)
    for number, name in enumerate(NAMES):
        model.add_adapter_to_model(name, lora(2 + number), seed=number if seeded else None)
        model.set_optimizer("SGD", lr=0.2, momentum=0.9, adapter_name=name)
    return model


def train(model: Any, share: slice) -> list[list[float]]:
    """Make three steps of both adapters in one call each, and return the norms."""
    norms = []
    for step in range(3):
        mine = {name: rows_of(name, step)[share] for name in NAMES}
        model.forward_backward(
            inputs=[row for rows in mine.values() for row in rows],
            adapter_name=[name for name, rows in mine.items() for _ in rows],
        )
        norms.append(model.clip_grad_and_step(0.5, adapter_name=list(NAMES)))
    return norms


def main(folder: Path) -> None:
    """Write what this rank has in the end."""
    torch.set_num_threads(1)
    twinkle.initialize(mode="local")
    rank, size = Platform.get_rank(), Platform.get_world_size()
    torch.manual_seed(rank)
    mesh = DeviceMesh.from_sizes(dp_size=size)
    model = build(folder, mesh)
    norms = train(model, mesh.get_slice(4))
    unseeded = build(folder, mesh, seeded=False)
    try:
        build(folder, DeviceMesh.from_sizes(fsdp_size=size))
        refusal = ""
    except Unsupported as error:
        refusal = str(error)
    found = {
        "norms": norms,
        "weights": {name: flat_of(model, name).detach() for name in NAMES},
        "first": {name: flat_of(unseeded, name).detach() for name in NAMES},
        "refusal": refusal,
    }
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

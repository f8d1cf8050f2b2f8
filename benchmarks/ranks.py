"""Several ranks: one flat all-reduce, the balance of the data loader, and weak scaling over two ranks.

    python benchmarks/ranks.py

- all-reduce: the 392 gradients (9.6 million numbers, float32) of a LoRA adapter r=16 on 28 layers of hidden size 1,024,
  two ranks on gloo; `sum_over_ranks` (its copies to and from buffers included) against one `all_reduce` for each
  tensor. Wall time of the slower rank, since ranks wait for each other: busy cores disturb it, so each turn counts the
  best of three calls, and the CPU time of both ranks is printed beside it. Goal: 5 x.
- balance: log-normal lengths, tokens of the fullest rank over the mean, mean over 100 batches; `balance="tokens"`
  against consecutive rows. 32 rows on 4 ranks, 128 on 8. A batch whose longest row is above the mean of a rank cannot
  be better than that row; such batches are left out. Goal: 1.02.
- weak scaling: Llama of hidden size 256, 16 layers, vocabulary 16,384, LoRA r=16, padding-free, 8 rows a rank. In turn,
  the first rank trains its rows alone, then both train theirs together. Tokens per CPU second of the slower rank, over
  those of the rank alone. Goal: 0.9. CPU time holds the work of exchanging gradients and the unequal work of the ranks,
  but not the wait for the other; the ratio of wall times, which does, is printed beside it and means something on idle
  cores only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
import torch.distributed as dist
from _pairs import describe_machine, ratio
from loop_vs_peft import lora, make_model
from transformers.utils import logging

import twinkle
from twinkle import DeviceMesh, Platform
from twinkle.dataloader import DataLoader
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.parallel import BUCKET_BYTES, sum_over_ranks

ALL_REDUCE, BALANCE, SCALING = 5.0, 1.02, 0.9
BATCHES, ROWS, BEST_OF = 100, 8, 3
Row = dict[str, Any]
Spent = tuple[float, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES >> 20, help="flat buffers of the all-reduce")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if options.rank:
        return work(options.rank, options.repetitions, options.bucket_mib)
    print(describe_machine(["torch", "transformers", "peft"]))
    good = [balance(32, 4), balance(128, 8)]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        sizes = [f"--repetitions={options.repetitions}", f"--bucket-mib={options.bucket_mib}"]
        command = [*launcher, __file__, "--rank", folder, *sizes]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found = json.loads(Path(folder, "found.json").read_text())
    good += [report_all_reduce(**found["all_reduce"]), report_scaling(found["scaling"])]
    return 0 if all(good) else 1


def balance(rows: int, ranks: int) -> bool:
    """Print how full the fullest rank is; say whether the goal is reached."""
    lengths = drawn(rows * BATCHES, seed=rows)
    data = [{"input_ids": [0] * length} for length in lengths]
    dealt = {"tokens": loads(data, rows, ranks, "tokens"), "rows": loads(data, rows, ranks, "rows")}
    bound = [rank_mean(lengths[i : i + rows], ranks) for i in range(0, len(lengths), rows)]
    fits = [n for n, full in enumerate(bound) if max(lengths[n * rows : (n + 1) * rows]) <= full]
    ours, consecutive = (mean(max(dealt[kind][n]) / mean(dealt[kind][n]) for n in fits) for kind in dealt)
    print(
        f"balance, {rows} rows on {ranks} ranks: tokens {ours:.4f}, consecutive rows {consecutive:.3f}   "
        f"goal <= {BALANCE}   ({len(fits)} of {BATCHES} batches counted)"
    )
    return ours <= BALANCE


def loads(data: list[Row], rows: int, ranks: int, kind: Literal["tokens", "rows"]) -> list[list[int]]:
    """Return the tokens of each rank in each batch, as each rank's data loader deals them."""
    columns = []
    for rank in range(ranks):
        with being(rank, ranks):
            loader = DataLoader(
                data, batch_size=rows, balance=kind, device_mesh=DeviceMesh.from_sizes(dp_size=ranks, device_type="cpu")
            )
            columns.append([tokens(batch) for batch in loader])
    return [list(row) for row in zip(*columns, strict=True)]


@contextmanager
def being(rank: int, ranks: int) -> Iterator[None]:
    """Make this process look like one of several."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def drawn(count: int, seed: int) -> list[int]:
    """Return log-normal lengths."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    lengths: list[int] = (4.6 + 0.9 * noise).exp().clamp(8, 1024).int().tolist()
    return lengths


def rank_mean(lengths: Sequence[int], ranks: int) -> float:
    """Return the share of one rank."""
    return sum(lengths) / ranks


def tokens(batch: Sequence[Row]) -> int:
    """Return the number of tokens of a batch."""
    return sum(len(row["input_ids"]) for row in batch)


def work(folder: Path, repetitions: int, bucket: int) -> int:
    """Do one rank's part; the first writes what was found."""
    twinkle.initialize(mode="local")
    found = {"all_reduce": all_reduce(2 * repetitions, bucket << 20), "scaling": scaling(folder, repetitions)}
    if Platform.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    return 0


def all_reduce(repetitions: int, bucket: int) -> dict[str, list[Spent]]:
    """Return what each way takes, in turn, after comparing their sums."""
    torch.manual_seed(Platform.get_rank())
    tensors = [torch.randn(16, 1024) for _ in range(196)] + [torch.randn(2048, 16) for _ in range(196)]
    ways: dict[str, Callable[..., None]] = {"flat": partial(sum_over_ranks, bucket_bytes=bucket), "each": one_by_one}
    sums = {name: [tensor.clone() for tensor in tensors] for name in ways}
    for name, way in ways.items():
        way(sums[name])
    if not all(torch.equal(a, b) for a, b in zip(*sums.values(), strict=True)):
        raise RuntimeError("the sums differ: no time is counted")
    spent: dict[str, list[Spent]] = {name: [] for name in ways}
    for number in range(repetitions + 1):
        for name in sorted(ways, reverse=bool(number % 2)):
            spent[name].append(min(exchange(partial(ways[name], tensors)) for _ in range(BEST_OF)))
            torch._foreach_mul_(tensors, 0.5**BEST_OF)
    return {name: values[1:] for name, values in spent.items()}


def exchange(function: Callable[[], object]) -> Spent:
    """Return wall seconds of the slower rank and CPU seconds of both for one call on each."""
    dist.barrier()
    clock, cpu = time.perf_counter(), time.process_time()
    function()
    mine = (time.perf_counter() - clock, time.process_time() - cpu)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, mine)
    return max(clock for clock, _ in gathered), sum(cpu for _, cpu in gathered)


def one_by_one(tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor by a message of its own."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def report_all_reduce(flat: list[Spent], each: list[Spent]) -> bool:
    """Print the two times; say whether the goal is reached."""
    clock, cpu = (ratio([spent[kind] for spent in each], [spent[kind] for spent in flat]) for kind in (0, 1))
    slow, fast = (median(spent[0] for spent in way) * 1e3 for way in (each, flat))
    print(
        f"all-reduce of 392 tensors, wall: each {slow:.0f} ms, flat {fast:.0f} ms, {clock} x   goal >= {ALL_REDUCE:g} "
        f"  (CPU time: {cpu.median:.2f} x)"
    )
    return clock.median >= ALL_REDUCE


def scaling(folder: Path, repetitions: int) -> list[dict[str, Any]]:
    """Return CPU and wall seconds of the first rank alone and of both together, by step."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in drawn(2 * ROWS * (repetitions + 1), seed=7):
        ids = torch.randint(3, 16384, (min(length, 400),), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [*ids[1:], -100]})
    single = model(folder, 1) if Platform.get_rank() == 0 else None
    joint = model(folder, 2)
    steps = []
    for batch in DataLoader(rows, batch_size=2 * ROWS, balance="tokens"):
        dist.barrier()
        alone = train(single, batch) if single is not None else (0.0, 0.0)
        dist.barrier()
        together = train(joint, batch)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, (*together, tokens(batch)))
        steps.append({"alone": alone, "together": gathered})
    return steps[1:]


def model(folder: Path, ranks: int) -> TransformersModel:
    """Return a model on this many ranks."""
    torch.manual_seed(5)
    mesh = DeviceMesh.from_sizes(dp_size=ranks)
    made = TransformersModel(model_id=str(folder), mixed_precision="no", device_mesh=mesh)
    made.add_adapter_to_model("default", lora())
    made.set_processor("InputProcessor", padding_free=True)
    made.set_optimizer("AdamW", lr=1e-4, weight_decay=0.0)
    return made


def train(model: TransformersModel, batch: list[Row]) -> tuple[float, float]:
    """Make one step; return its CPU and wall seconds."""
    cpu, clock = time.process_time(), time.perf_counter()
    model.forward_backward(inputs=batch)
    model.clip_grad_and_step(max_grad_norm=1.0)
    return time.process_time() - cpu, time.perf_counter() - clock


def report_scaling(steps: list[dict[str, Any]]) -> bool:
    """Print the efficiency; say whether the goal is reached."""
    cpu, clock = ([efficiency(step, column) for step in steps] for column in (0, 1))
    print(
        f"weak scaling, 2 ranks: {median(cpu):.3f} (min {min(cpu):.3f}, max {max(cpu):.3f}) by CPU time   "
        f"goal >= {SCALING}   ({median(clock):.3f} by wall time)"
    )
    return median(cpu) >= SCALING


def efficiency(step: dict[str, Any], column: int) -> float:
    """Return tokens per second of two ranks over twice that of one."""
    together = step["together"]
    both = sum(entry[2] for entry in together) / max(entry[column] for entry in together)
    return float(both / (2 * together[0][2] / step["alone"][column]))


if __name__ == "__main__":
    sys.exit(main())

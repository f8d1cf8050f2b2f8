"""An adapter on its way from a trainer to a sampler: in memory, against files.

    python benchmarks/weight_sync.py

Random Qwen3, 28 layers of hidden 512, vocabulary 1,024, float32, one thread; LoRA r=32 on all linear layers: 392
tensors, 8.7 million numbers. `sync_weights(merge_and_sync=False)` into a sampler with weights of its own, against
PEFT's `save_pretrained` into memory (`/dev/shm`, where there is one) with `load_peft_weights` and
`set_peft_model_state_dict`; also against the same file read by the sampler (`read_adapter`). What arrives is compared
first. Goals: at most 10 ms, and at least 50 x faster than PEFT's way. The shared sampler's sync and the merged one are
shown without a goal.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _pairs import describe_machine, in_turn, ratio
from peft import LoraConfig, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_tokenizer

LIMIT, GOAL = 0.010, 50.0
MEMORY = Path("/dev/shm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT asks for what has a new name
    print(describe_machine(["torch", "transformers", "peft"]))
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        make_model(Path(folder, "model"), options.layers)
        return 0 if compare(Contest(Path(folder)), options.repetitions) else 1


def make_model(folder: Path, layers: int) -> None:
    """Write the model of this benchmark."""
    config = Qwen3Config(
        vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


class Contest:
    """A trainer, a sampler with weights of its own and one that shares the trainer's."""

    def __init__(self, folder: Path) -> None:
        place, self.file = str(folder / "model"), folder / "adapter"
        lora = LoraConfig(r=32, target_modules="all-linear", init_lora_weights=False)
        self.model: Any = TransformersModel(model_id=place, mixed_precision="no")
        self.model.add_adapter_to_model("default", lora)
        self.model.add_adapter_to_model("other", lora)  # what PEFT's way writes into
        self.model._adapters.select("default")
        self.model._adapters.active = "default"
        self.sampler: Any = TorchSampler(place)
        self.shared: Any = TorchSampler(model=self.model)
        self.managers = [CheckpointEngineManager(self.model, sampler) for sampler in (self.sampler, self.shared)]
        self.merging = CheckpointEngineManager(self.model, TorchSampler(place))

    def change(self) -> None:
        """Do as a step of training does: every matrix is written."""
        with torch.no_grad():
            torch._foreach_mul_([p for n, p in self.model.model.named_parameters() if ".default." in n], 1.0)

    def in_memory(self) -> None:
        """Sync the adapter."""
        self.change()
        self.managers[0].sync_weights(merge_and_sync=False)

    def publish(self) -> None:
        """Sync with a shared model."""
        self.change()
        self.managers[1].sync_weights()

    def merge(self) -> None:
        """Sync everything, merged."""
        self.change()
        self.merging.sync_weights()

    def by_peft(self) -> None:
        """Save and load as PEFT does."""
        self.change()
        self.model.model.save_pretrained(self.file, selected_adapters=["default"], save_embedding_layers=False)
        weights = load_peft_weights(str(self.file))
        set_peft_model_state_dict(self.model.model, weights, adapter_name="other")

    def by_file(self) -> None:
        """Save as PEFT does, and let the sampler read the file."""
        self.change()
        self.model.model.save_pretrained(self.file, selected_adapters=["default"], save_embedding_layers=False)
        self.sampler.read_adapter(self.file)


def compare(contest: Contest, repetitions: int) -> bool:
    """Check that the numbers arrive, then time."""
    contest.in_memory()
    contest.by_peft()
    _check(contest)
    names = {
        "in memory": contest.in_memory, "PEFT's files": contest.by_peft, "file, read by the sampler": contest.by_file,
        "shared model": contest.publish, "merged": contest.merge, "writing alone": contest.change,
    }  # fmt: skip
    seconds = in_turn(names, repetitions)
    idle = median(seconds.pop("writing alone"))
    print(f"{'way':28} {'ms':>9}")
    for name, values in seconds.items():
        print(f"{name:28} {1000 * max(0.0, median(values) - idle):9.2f}")
    mine = median(seconds["in memory"]) - idle
    faster = (median(seconds["PEFT's files"]) - idle) / mine
    print(f"in memory against PEFT's files: {faster:.0f} x faster (goal {GOAL:.0f} x, and {1000 * LIMIT:.0f} ms)")
    beside = ratio(seconds["file, read by the sampler"], seconds["in memory"])
    print(f"against the same file read by the sampler: {beside.median:.0f} x")
    return faster >= GOAL and mine <= LIMIT


def _check(contest: Contest) -> None:
    arrived = contest.sampler._source.pick("", None, None).version
    wanted = contest.sampler.read_adapter(contest.file)
    for name, entry in wanted.layout.entries.items():
        mine = arrived.layout.entries[name]
        same = torch.equal(mine.down_of(arrived.flat), entry.down_of(wanted.flat))
        if not same or not torch.equal(mine.up_of(arrived.flat), entry.up_of(wanted.flat)):
            raise SystemExit(f"what arrived at {name} is not what was sent")


if __name__ == "__main__":
    sys.exit(main())

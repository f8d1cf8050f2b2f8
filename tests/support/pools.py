"""Many adapters on one tiny model, and each of them alone: with PEFT and torch's own AdamW."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rounding import gap
from torch import Tensor
from transformers import AutoModelForCausalLM

from twinkle.model import MultiLoraTransformersModel
from twinkle.testing import tiny_model

VOCABULARY = 264
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Row = dict[str, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def make_rows(count: int, length: int | Sequence[int], seed: int) -> list[Row]:
    """Return rows of random tokens; `labels[i]` is the token after position i.

    Args:
        count: of rows.
        length: of each row, or the lengths that rows take in turn.
        seed: of the tokens.
    """
    lengths = [length] * count if isinstance(length, int) else [length[i % len(length)] for i in range(count)]
    draw = torch.Generator().manual_seed(seed)
    found = []
    for size in lengths:
        ids = torch.randint(1, 256, (size,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": [*ids[1:], -100]})
    return found


def open_pool(folder: Path, **options: Any) -> MultiLoraTransformersModel:
    """Return a model of many adapters without any, in float32."""
    return MultiLoraTransformersModel(model_id=str(folder), **{"mixed_precision": "no", **options})


def lora(rank: int = 4, **fields: Any) -> dict[str, Any]:
    """Return a configuration whose B is not 0, so that all gradients say something."""
    return {"r": rank, "lora_alpha": 8, "target_modules": LINEAR, "init_lora_weights": False, **fields}


def flat_of(model: Any, name: str) -> Any:
    """Return an adapter's one parameter."""
    return model.pool.tenants[name].flat


def moments_of(model: Any, name: str) -> dict[str, Tensor]:
    """Return all tensors of an adapter's optimizer state, by number and name."""
    state = model.optimizer_group[name].optimizer.state_dict()["state"]
    return {f"{at}.{key}": torch.as_tensor(value) for at, part in state.items() for key, value in part.items()}


def distance(one: Tensor, other: Tensor) -> float:
    """Return how far two tensors are apart, relative to the second one's norm."""
    return gap(one, other)


class Alone:
    """One adapter, alone in PEFT's model, with a plain loop around it.

    Args:
        folder: of the base model.
        config: the adapter's.
        weights: to begin with, by PEFT's names.
        lr: learning rate.
        optimizer: class of `torch.optim`.
        **options: of the optimizer.
    """

    def __init__(
        self, folder: Path, config: LoraConfig | Mapping[str, Any], weights: Mapping[str, Tensor], *, lr: float = 1e-2,
        optimizer: Any = torch.optim.AdamW, **options: Any,
    ) -> None:  # fmt: skip
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = config if isinstance(config, LoraConfig) else LoraConfig(**config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied weights
            self.model: PeftModel = get_peft_model(base, config)
        self.model.eval()
        self.parameters = {
            name.replace(".default.", "."): p for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.load(weights)
        self.optimizer = optimizer(list(self.parameters.values()), lr=lr, **options)
        self.denominator = 0.0

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, which must be all there are."""
        assert self.parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, value in weights.items():
                self.parameters[name].copy_(value)

    def logits(self, row: Row) -> Tensor:
        """Return logits `[T, V]` of one row."""
        found: Tensor = self.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        return found

    def logps(self, row: Row) -> Tensor:
        """Return log-probabilities `[T]` of the labels, 0 where there is none."""
        labels = torch.tensor(row["labels"])
        scores = self.logits(row).log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        return scores * (labels != -100)

    def backward(self, rows: Sequence[Row]) -> float:
        """Add the gradients of the summed cross entropy of rows and return its mean over trained tokens."""
        total = -torch.cat([self.logps(row) for row in rows]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        count = sum(label != -100 for row in rows for label in row["labels"])
        self.denominator += count
        return float(total.detach()) / max(1, count)

    def gradients(self) -> dict[str, Tensor]:
        """Return the pending gradients."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def step(self, max_norm: float = 1.0) -> float:
        """Divide (by 0 is 0), clip, step and forget the gradients; return their norm before clipping."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.denominator if self.denominator else 0.0)
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.denominator = 0.0
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by PEFT's names."""
        return {name: p.detach() for name, p in self.parameters.items()}

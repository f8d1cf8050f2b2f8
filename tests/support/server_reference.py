"""The same numbers from PEFT and torch.optim, beginning with the files that the service exported."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from server_raw import Raw, RawModel
from torch import Tensor
from transformers import AutoModelForCausalLM

ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def export(model: RawModel, name: str, folder: Path) -> Path:
    """Have the service write a model as PEFT files, fetch them by their links, and return their folder."""
    return fetch(model.raw, model.save_external(name), folder / name)


def fetch(raw: Raw, path: str, folder: Path) -> Path:
    """Fetch the files of an external checkpoint by the links that the service gives."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    urls = raw.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")["urls"]
    folder.mkdir(parents=True)
    for file, url in urls.items():
        assert "/" not in file, file
        answer = httpx.get(httpx.URL(raw.url).join(url), trust_env=False, timeout=30)
        assert answer.status_code == 200, answer.text[:300]
        (folder / file).write_bytes(answer.content)
    return folder


class Reference:
    """One adapter in PEFT's model.

    Args:
        base: folder of the base model.
        adapter: folder of the adapter; None is the base model alone.
    """

    def __init__(self, base: Path, adapter: Path | None = None) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's advice about tied weights
                self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        self.model.eval()
        self.trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.optimizer: torch.optim.AdamW | None = None

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return logits `[T, V]`."""
        found: Tensor = self.model(input_ids=torch.tensor([list(tokens)])).logits[0]
        return found

    def logps(self, tokens: Sequence[int], targets: Any) -> Tensor:
        """Return log-probabilities of targets `[T]` or `[T, K]`, without any shift."""
        targets = torch.as_tensor(targets)
        wide = targets if targets.dim() == 2 else targets[:, None]
        found = self.logits(tokens).log_softmax(-1).gather(-1, wide)
        return found if targets.dim() == 2 else found[:, 0]

    def scores(self, tokens: Sequence[int]) -> Tensor:
        """Return the log-probability of every token but the first."""
        with torch.no_grad():
            return self.logps(tokens[:-1], list(tokens[1:]))

    def step(self, adam: Mapping[str, float]) -> float:
        """Clip, step as torch's AdamW does and forget the gradients; return their norm before clipping."""
        values = {**ADAM, **adam}
        options = {
            "lr": values["learning_rate"], "betas": (values["beta1"], values["beta2"]), "eps": values["eps"],
            "weight_decay": values["weight_decay"],
        }  # fmt: skip
        parameters = list(self.trained.values())
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(parameters, **options)
        for group in self.optimizer.param_groups:
            group.update(options)
        norm = torch.nn.utils.clip_grad_norm_(parameters, values["grad_clip_norm"] or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def loss(name: str, lp: Tensor, inputs: Mapping[str, Any], config: Mapping[str, float]) -> Tensor:
    """Return the loss of one row, by the published formula.

    Args:
        name: of the loss.
        lp: log-probabilities of the targets.
        inputs: of the row.
        config: of the request; what is missing has its published default.
    """
    if name == "cross_entropy":
        return -(torch.as_tensor(inputs["weights"]) * lp).sum()
    old, gains = torch.as_tensor(inputs["logprobs"]), torch.as_tensor(inputs["advantages"])
    ratio = (lp - old).exp()
    if name == "importance_sampling":
        return -(ratio * gains).sum()
    if name == "dro":
        return -(lp * gains - 0.5 * config["beta"] * (lp - old) ** 2).sum()
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "ppo":
        return -torch.minimum(ratio * gains, ratio.clamp(low, high) * gains).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * lp * gains).sum()
    assert name == "gspo", name
    mask = torch.as_tensor(inputs["sequence_ratio_mask"]) != 0
    mean = (lp.detach() - old)[mask].mean() if mask.any() else torch.zeros(())
    ratio = (mean + lp - lp.detach()).exp()
    return -torch.minimum(ratio * gains, ratio.clamp(low, high) * gains).sum()

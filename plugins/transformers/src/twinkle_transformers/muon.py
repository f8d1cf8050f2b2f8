"""Muon for the matrices of the layers and AdamW for everything else, as one optimizer with one state."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle.logging import get_logger

PREFIX = "adamw_"
ADAMW_NAMES = (r"embed", r"\bwte\b", r"\bwpe\b", r"\bshared\b", r"head\b", r"\boutput_layer\b")
"""Names of embeddings and heads: matrices, but tables of vectors rather than maps, which AdamW updates."""

_SHARED = ("lr", "weight_decay")
_ADAMW = ("lr", "weight_decay", "betas", "eps")
_PARTS = ("muon", "adamw")


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024, kellerjordan.github.io/posts/muon) with AdamW beside it.

    `torch.optim.Muon` updates matrices; `torch.optim.AdamW` updates embeddings, heads and everything that is not a
    matrix (norms, biases, convolutions, experts stacked in one tensor). The key `algorithm` of each parameter group
    names its part. Groups without names (bare parameters) are split by dimension only.

    Args:
        params: as torch's: parameters, pairs of name and parameter, or groups of either with options of their own.
        lr: learning rate of Muon, and of AdamW unless `adamw_lr` is given.
        weight_decay: decoupled weight decay of Muon, and of AdamW unless `adamw_weight_decay` is given.
        momentum: of Muon.
        nesterov: of Muon.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: lower bound of the norm that the iteration divides by.
        ns_steps: iterations.
        adjust_lr_fn: "original" (the default) or "match_rms_adamw" (arXiv:2502.16982), with which one learning rate
            and weight decay serve both parts.
        adamw_lr: learning rate of AdamW.
        adamw_weight_decay: weight decay of AdamW; groups without decay stay without.
        adamw_betas: of AdamW.
        adamw_eps: of AdamW.
        adamw_match: regular expressions; AdamW updates a matrix whose name matches one of them.

    Raises:
        ArgumentError: an option of a group that neither part has.
    """

    splits_by_name = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_match: str | Sequence[str] = ADAMW_NAMES,
    ) -> None:
        patterns = [adamw_match] if isinstance(adamw_match, str) else list(adamw_match)
        try:
            self._match = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
        except re.error as error:
            raise ArgumentError(
                f"Muon: adamw_match must be regular expressions, got {adamw_match!r}: {error}"
            ) from error
        muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                "ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn}  # fmt: skip
        adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": tuple(adamw_betas), "eps": adamw_eps}
        self._options: dict[str, dict[str, Any]] = {
            "muon": muon,
            "adamw": {key: value for key, value in adamw.items() if value is not None},
        }
        self._inner: dict[str, torch.optim.Optimizer] = {}
        super().__init__(params, {})  # each group already has all options of its part
        self.defaults = dict(muon)
        self._parts()
        counts = [sum(p.numel() for g in self._groups(part) for p in g["params"]) for part in _PARTS]
        get_logger().info("Muon updates %d numbers, AdamW %d", *counts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Split a group into the parameters of Muon and those of AdamW, and add both."""
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        pairs = [item if isinstance(item, tuple) else ("", item) for item in members]
        adamw_ids = {id(p) for name, p in pairs if p.ndim != 2 or self._match.search(name)}
        options = {key: value for key, value in param_group.items() if key != "params"}
        for part in _PARTS:
            parameters = [p for _, p in pairs if (id(p) in adamw_ids) == (part == "adamw")]
            if parameters:
                super().add_param_group({"params": parameters, **self._group_options(part, options)})
        self._inner = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, inner in self._parts().items():
            # Share groups and state with both parts: a checkpoint or load_state_dict() may have replaced them here.
            inner.param_groups, inner.state = self._groups(part), self.state
            inner.step()
        return loss

    def key_of(self, group: Mapping[str, Any], name: str) -> str | None:
        """Return the key of `group` that the option `name` sets: `adamw_lr` is AdamW's `lr`, `lr` is Muon's.

        `lr` and `weight_decay` are AdamW's too where no `adamw_lr` or `adamw_weight_decay` was given.
        """
        if group["algorithm"] == "muon":
            return name if name in self._options["muon"] else None
        key = name.removeprefix(PREFIX)
        named = key != name and key in _ADAMW
        return key if named or name in group["follows"] else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inner = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_match": self._match, "_options": self._options}

    def _groups(self, part: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == part]

    def _parts(self) -> dict[str, torch.optim.Optimizer]:
        if not self._inner:
            classes: dict[str, Any] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
            self._inner = {part: classes[part](groups) for part in _PARTS if (groups := self._groups(part))}
        return self._inner

    def _group_options(self, part: str, given: Mapping[str, Any]) -> dict[str, Any]:
        own = {key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)}
        plain = {key: value for key, value in given.items() if not key.startswith(PREFIX)}
        decays = plain.pop("decays", True)
        if odd := [key for key in plain if key not in self._options["muon"]] + [
            PREFIX + key for key in own if key not in _ADAMW
        ]:
            raise ArgumentError(f"Muon has no {odd[0]!r} for a parameter group")
        if part == "muon":
            return {**self._options["muon"], **plain, "algorithm": part, "decays": decays}
        shared = {key: plain.get(key, self._options["muon"][key]) for key in _SHARED}
        chosen = {**self._options["adamw"], **own}
        if not decays and "weight_decay" not in own:
            chosen["weight_decay"] = 0.0
        follows = tuple(key for key in _SHARED if key not in chosen)
        return {**shared, **chosen, "algorithm": part, "decays": decays, "follows": follows}

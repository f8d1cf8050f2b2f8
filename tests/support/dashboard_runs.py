"""Runs for tests of the dashboard: a model folder with a tokenizer of bytes, and training on rows that were sampled."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ledger_engine import MODEL
from server_raw import Raw, RawModel, datum
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HOSTILE = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>\"'&amp; é漢"
"""Text of a rollout, and of names, that must be shown as it is and never run."""


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({mark: place for place, mark in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def model_folder(folder: Path) -> Path:
    """Write a folder that passes for a model, with a tokenizer, and return it."""
    shutil.copytree(MODEL, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def sampled_row(prompt: Sequence[int], answer: Sequence[int], reward: float, shift: float = 0.0) -> Any:
    """Return a row for a policy loss; `shift` is how far the sampler's log-probabilities are from the ledger's."""
    tokens = [*prompt, *answer]
    targets, count = tokens[1:], len(tokens) - 1
    own = np.arange(count) >= len(prompt) - 1
    logprobs = np.where(own, ledger_logprobs(targets) + shift, 0.0).astype(np.float32)
    advantages = np.where(own, reward - 0.5, 0.0).astype(np.float32)
    return datum(
        tokens[:-1], target_tokens=targets, logprobs=logprobs, advantages=advantages,
        rewards=np.array([reward], np.float32),
    )  # fmt: skip


def ledger_logprobs(targets: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return what the ledger engine gives as log-probabilities of targets."""
    return -1.0 - (np.asarray(targets) % 7).astype(np.float32) / 7


def learn(model: RawModel, steps: int, text: str = "2 + 3 = 5", prompt: str = "Add: ", lr: float = 1e-3) -> None:
    """Train some steps on four rollouts each, of which one differs more and more from what the sampler said."""
    tokenizer = byte_tokenizer()
    question, answer = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    for step in range(steps):
        rows = [sampled_row(question, answer, reward=float(place % 2), shift=0.02 * place) for place in range(4)]
        model.forward_backward(rows, "importance_sampling")
        model.step(learning_rate=lr * (1 + step))


def hostile_model(raw: Raw) -> RawModel:
    """Create a model whose metadata would be code if a page did not escape it."""
    return raw.model(user_metadata={HOSTILE[:60]: HOSTILE})

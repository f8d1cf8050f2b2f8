"""Whether a model's folder has a tokenizer; libraries make an empty one of its configuration alone, and say nothing."""

from pathlib import Path

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
)
"""Files with the vocabulary of a tokenizer, of which one is enough."""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer's vocabulary."""
    return any(any(folder.glob(name)) for name in _VOCABULARIES)

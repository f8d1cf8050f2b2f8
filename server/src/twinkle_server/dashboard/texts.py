"""Decodes recorded tokens for display with the model's own tokenizer."""

import asyncio
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinkle_server.engine.recording import Rollout

_log = logging.getLogger(__name__)
_FILE: Final = "tokenizer.json"
_SHADES: Final = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Limits of the mismatch, in nats, between the shades of a token."""
_PARTS: Final = 4
"""Maximum number of tokens of one character; longer sequences are no valid text."""


@dataclass(slots=True)
class Piece:
    """Some tokens that form a text together, usually one.

    Attributes:
        text: of the tokens; their ids without a tokenizer.
        tokens: ids.
        sampled: whether they were sampled; the others belong to the prompt.
        shade: 0 to 5, by the mismatch; 0 for prompts.
        mismatch: largest |trained - sampled| of the tokens; None for prompts.
        old: log-probability when sampled, of the last token.
        new: log-probability in training, of the last token.
        advantage: of the last token.
    """

    text: str
    tokens: list[int]
    sampled: bool = False
    shade: int = 0
    mismatch: float | None = None
    old: float | None = None
    new: float | None = None
    advantage: float | None = None


class Texts:
    """Decodes tokens with the tokenizer of a model folder.

    Args:
        model: the folder.
    """

    def __init__(self, model: str) -> None:
        self._path = Path(model) / _FILE
        self._tokenizer: Any = None
        self._loading: asyncio.Task[Any] | None = None

    async def ready(self) -> bool:
        """Load the tokenizer once, on a thread; return whether there is one."""
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        self._tokenizer = await asyncio.shield(self._loading)
        return self._tokenizer is not None

    def _load(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            _log.warning("the dashboard shows token ids: tokenizers is not installed; pip install tokenizers")
            return None
        try:
            return Tokenizer.from_file(str(self._path))
        except Exception as error:  # tokenizers raises plain exceptions
            _log.warning("the dashboard shows token ids: the model has no readable %s: %s", _FILE, error)
            return None

    def pieces(self, rollout: Rollout) -> list[Piece]:
        """Return a rollout as pieces of text, in order; bytes of one character stay together."""
        pieces: list[Piece] = []
        piece = Piece("", [])
        stream = _Stream(self._tokenizer)
        for place, token in enumerate(rollout.tokens.tolist()):
            piece.tokens.append(token)
            if place:
                _describe(piece, rollout, place - 1)
            text = stream.step(piece.tokens)
            if text is not None:
                piece.text = text
                pieces.append(piece)
                piece = Piece("", [])
        if piece.tokens:
            piece.text = "\ufffd"
            pieces.append(piece)
        return pieces


class _Stream:
    """Decodes token by token; without a tokenizer, it returns ids.

    Args:
        tokenizer: of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream: Any = None

    def step(self, tokens: list[int]) -> str | None:
        """Return the text of tokens, of which the last one is new; None if they end within a character."""
        if self._tokenizer is None:
            return f"{tokens[-1]} "
        if self._tokenizer.id_to_token(tokens[-1]) is None:
            self._stream = None
            return f"<{tokens[-1]}>"
        try:
            text: str | None = self._next(tokens[-1])
        except Exception:  # tokenizers raises plain exceptions for sequences that its stream cannot decode
            text = None
            self._stream = None
        if text is None and (self._stream is None or len(tokens) >= _PARTS):
            self._stream = None
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _next(self, token: int) -> str | None:
        if self._stream is None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=False)
        text: str | None = self._stream.step(self._tokenizer, token)
        return text


def text_of(pieces: list[Piece], sampled: bool) -> str:
    """Return the sampled text, or that of the prompt."""
    return "".join(piece.text for piece in pieces if piece.sampled is sampled)


def _describe(piece: Piece, rollout: Rollout, place: int) -> None:
    old, new = float(rollout.sampled[place]), float(rollout.trained[place])
    if math.isnan(old):
        return
    mismatch = abs(new - old)
    piece.sampled = True
    piece.old, piece.new, piece.advantage = old, new, float(rollout.advantages[place])
    piece.mismatch = max(mismatch, piece.mismatch or 0.0)
    piece.shade = sum(piece.mismatch > limit for limit in _SHADES)

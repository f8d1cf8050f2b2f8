"""Constrained decoding: grammars that sampled text must follow, and masks of the tokens that fit (llguidance)."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format.sampling import JSON_WHITESPACE
from twinkle.errors import ArgumentError, RequirementMissing, Unsupported

_KEPT = 64  # compiled grammars
_WORD = 32  # bits of a mask in one integer


class Grammars:
    """Compiles the grammars of one tokenizer, and keeps the last ones.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocabulary: number of token ids of the model.
        ends: ids that end a text; a grammar allows them where the text is complete.

    Raises:
        RequirementMissing: llguidance is not installed.
        Unsupported: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise RequirementMissing("structured_outputs needs llguidance; run: pip install llguidance") from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise Unsupported(
                f"structured_outputs needs a fast tokenizer, but this model has a {type(tokenizer).__name__}"
            )
        self._library: Any = llguidance
        size = max(vocabulary, backend.get_vocab_size(with_added_tokens=True))
        end = sorted(ends) or getattr(tokenizer, "eos_token_id", None)
        self._tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=end)
        self._words = -(-size // _WORD)
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def compile(self, structure: Mapping[str, Any]) -> "Grammar":
        """Return the grammar of `SamplingParams.structured_outputs`.

        Raises:
            ArgumentError: the schema, pattern or grammar is invalid or too complex.
        """
        key = json.dumps(structure, sort_keys=True)
        if key not in self._compiled:
            matcher = self._library.LLMatcher(self._tokenizer, source_of(structure), log_level=0)
            if matcher.is_error():
                raise ArgumentError(f"structured_outputs cannot be used: {' '.join(matcher.get_error().split())[:500]}")
            self._compiled[key] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Grammar(self._compiled[key].deep_copy(), self._words, frozenset(self._tokenizer.eos_tokens))


def source_of(structure: Mapping[str, Any]) -> str:
    """Return the grammar of `SamplingParams.structured_outputs` in llguidance's form.

    Raises:
        ArgumentError: a JSON schema is not JSON.
    """
    from llguidance import LLMatcher

    ((kind, value),) = structure.items()
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(value)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    schema = {"type": "object"} if kind == "json_object" else value
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_WHITESPACE})
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"structured_outputs: the JSON schema cannot be read: {error}") from error


class Grammar:
    """The state of one sequence in a grammar.

    Args:
        matcher: of llguidance.
        words: size of a mask in integers of 32 bits.
        ends: ids that end a text.
    """

    def __init__(self, matcher: Any, words: int, ends: frozenset[int]) -> None:
        self._matcher, self.words, self.ends = matcher, words, ends

    def copy(self) -> "Grammar":
        """Return an independent copy, for another sequence."""
        return Grammar(self._matcher.deep_copy(), self.words, self.ends)

    @property
    def complete(self) -> bool:
        """Whether the text is complete, and no token can continue it."""
        return bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """Add the next token, which its mask allows and which does not end the text.

        Raises:
            ArgumentError: the grammar is too complex for this text.
        """
        if not self._matcher.consume_token(token):
            raise self._failed()

    def fill(self, words: Tensor) -> None:
        """Write the mask of the next token into int32 `[W]` on the host."""
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        if self._matcher.is_error():
            raise self._failed()

    def _failed(self) -> ArgumentError:
        return ArgumentError(f"structured_outputs: {' '.join(self._matcher.get_error().split())[:500]}")


def mask_of(grammars: Sequence[Grammar], vocabulary: int, device: torch.device) -> Tensor:
    """Return bool `[n, V]`: the tokens that each grammar allows next.

    Args:
        grammars: of n sequences with the same tokenizer.
        vocabulary: number of logits.
        device: of the result.
    """
    words = torch.zeros((len(grammars), grammars[0].words), dtype=torch.int32)
    for row, grammar in zip(words, grammars, strict=True):
        grammar.fill(row)
    bits = (words.to(device)[:, :, None] >> torch.arange(_WORD, dtype=torch.int32, device=device)) & 1
    allowed = bits.flatten(1).bool()[:, :vocabulary]
    if allowed.shape[1] < vocabulary:
        allowed = torch.nn.functional.pad(allowed, (0, vocabulary - allowed.shape[1]))
    return allowed

"""Tokens become text piece by piece; the pieces are the text, whatever their sizes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from twinkle.testing import tiny_tokenizer
from twinkle_server.chat.decoding import TextDecoder, TokenTexts

TEXTS = st.text(st.sampled_from("ab xé漢🙂\n"), max_size=24)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)
END = 258


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer().backend_tokenizer


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut tokens into pieces of these sizes, over and over."""
    parts, place = [], 0
    while place < len(tokens):
        size = cuts[len(parts) % len(cuts)]
        parts.append(tokens[place : place + size])
        place += size
    return parts


def read(tokenizer: Tokenizer, tokens: list[int], cuts: list[int], stops: list[str], stopped: bool) -> tuple[str, Any]:
    decoder = TextDecoder(tokenizer, stops)
    parts = pieces(tokens, cuts) or [[]]
    shown = [decoder.add(part) for part in parts[:-1]]
    return "".join([*shown, decoder.finish(parts[-1], stopped)]), decoder.stop


@given(text=TEXTS, cuts=CUTS)
def test_the_pieces_are_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens = tokenizer.encode(text).ids
    assert read(tokenizer, tokens, cuts, [], stopped=False) == (text, None)
    assert read(tokenizer, [*tokens, END], cuts, [], stopped=True) == (text, None)


@given(text=TEXTS, cuts=CUTS, stop=st.sampled_from(["ab", "é", " x", "🙂"]))
def test_nothing_from_a_stop_string_on_is_shown(tokenizer: Tokenizer, text: str, cuts: list[int], stop: str) -> None:
    tokens, found = tokenizer.encode(text).ids, stop in text
    expected = text.partition(stop)[0], stop if found else None
    assert read(tokenizer, tokens, cuts, [stop, "zzz"], stopped=found) == expected


def test_characters_are_not_cut_and_do_not_wait_for_ever(tokenizer: Tokenizer) -> None:
    decoder = TextDecoder(tokenizer)
    first, second = tokenizer.encode("é").ids
    assert (decoder.add([first]), decoder.add([second])) == ("", "é")
    assert "".join(decoder.add([first]) for _ in range(40))


def test_a_token_has_its_bytes(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    first, second = (texts[token] for token in tokenizer.encode("é").ids)
    assert bytes(first.data + second.data) == "é".encode()
    assert (first.name, second.name) == ("bytes:\\xc3", "bytes:\\xa9")
    assert texts[tokenizer.encode("x").ids[0]].name == "x"
    assert (texts[END].text, bytes(texts[END].data)) == ("<|im_end|>", b"<|im_end|>")


def test_text_that_continues_a_prompt_keeps_its_first_space() -> None:
    """Decoders of SentencePiece drop a space at the start, which is no start here."""
    vocabulary = {"▁The": 0, "▁sky": 1, "▁is": 2, "▁blue": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    for before, text in (((), "is blue"), ((0, 1), " is blue")):
        streamed = TextDecoder(tokenizer, before=before)
        assert streamed.add([2]) + streamed.add([3]) + streamed.finish([], False) == text
        assert TextDecoder(tokenizer, before=before).finish([2, 3], False) == text
    stopped = TextDecoder(tokenizer, ["sky"], before=(0, 1))
    assert (stopped.finish([2, 3], False), stopped.stop) == (" is blue", None), "what was before does not stop it"

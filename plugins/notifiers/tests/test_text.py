"""Messages that are too long: whatever the letters, they fit, keep both ends, and say what is missing."""

import re

from hypothesis import given
from hypothesis import strategies as st

from twinkle_notifiers.text import bytes_of, clean, json_bytes_of, shortened

SIZES = st.sampled_from([len, bytes_of, json_bytes_of])
MARK = re.compile(r"\n\[\.\.\. (\d+) letters left out \.\.\.\]\n")


@given(st.text(), st.integers(min_value=80, max_value=300), SIZES, st.integers(min_value=1, max_value=40))
def test_a_text_fits_and_loses_its_middle_alone(text: str, limit: int, size: object, times: int) -> None:
    assert callable(size)
    text = clean(text * times)
    result = shortened(text, limit, size)
    assert size(result) <= limit
    if size(text) <= limit:
        assert result == text
        return
    # The mark is ours: what stands around it is what the text begins and ends with.
    begin, number, end = next(
        parts
        for match in MARK.finditer(result)
        if text.startswith((parts := (result[: match.start()], match[1], result[match.end() :]))[0])
        and text.endswith(parts[2])
    )
    assert len(begin) + int(number) + len(end) == len(text)
    assert 0 <= len(begin) - len(end) <= 1


@given(st.text(alphabet=st.characters(codec=None)))
def test_a_message_can_be_encoded_and_is_not_empty(text: str) -> None:
    assert clean(text).encode("utf-8")

"""Whole numbers in words, English and Chinese."""

_BELOW_20 = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SIZES = ((10**6, "million"), (1000, "thousand"), (100, "hundred"))
_DIGITS = "零一二三四五六七八九"
_LIMIT = 10**8


def english(number: int) -> str:
    """Return a number between -99,999,999 and 99,999,999 in English words: -342 is `minus three hundred forty-two`."""
    _check(number)
    if number < 0:
        return f"minus {english(-number)}"
    if number < 20:
        return _BELOW_20[number]
    if number < 100:
        tens = _TENS[number // 10 - 2]
        return tens if number % 10 == 0 else f"{tens}-{_BELOW_20[number % 10]}"
    size, name = next(pair for pair in _SIZES if number >= pair[0])
    rest = number % size
    return f"{english(number // size)} {name}" + (f" {english(rest)}" if rest else "")


def chinese(number: int) -> str:
    """Return a number between -99,999,999 and 99,999,999 in Chinese: -342 is `负三百四十二`, 12 is `十二`."""
    _check(number)
    if number < 0:
        return f"负{chinese(-number)}"
    if number == 0:
        return "零"
    high, low = divmod(number, 10**4)
    if high == 0:
        words = _four_digits(low)
    else:
        gap = "零" if 0 < low < 1000 else ""
        words = _four_digits(high) + "万" + gap + (_four_digits(low) if low else "")
    return words.removeprefix("一") if words.startswith("一十") else words


def _four_digits(number: int) -> str:
    words = ""
    for size, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // size % 10
        if digit:
            words += _DIGITS[digit] + name
        elif words and not words.endswith("零") and number % size:
            words += "零"
    return words


def _check(number: int) -> None:
    if not -_LIMIT < number < _LIMIT:
        raise ValueError(f"{number} is out of range; numbers in words have at most eight digits")

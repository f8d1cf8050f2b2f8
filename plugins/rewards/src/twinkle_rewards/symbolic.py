"""Compares two formulas by math-verify; runs in the process of a `Worker`."""

import logging


def prepare() -> None:
    """Import what takes seconds."""
    logging.disable(logging.CRITICAL)
    equal("\\frac{1}{2}", "0.5")


def equal(truth: str, said: str) -> bool:
    """Return whether an answer, in LaTeX or plain text, equals the ground truth.

    Its own limits use signals, which other threads do not have, and do not end what computes in C: they are off.
    """
    from math_verify import parse, verify

    known, found = (parse(f"${text}$", parsing_timeout=None) for text in (truth, said))
    return bool(verify(known, found, timeout_seconds=None))

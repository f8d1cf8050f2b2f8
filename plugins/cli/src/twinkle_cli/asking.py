"""Asks whether code may run; where nobody can be asked, the answer is no, with the flag that says yes."""

import sys

import click


def confirmed(question: str, *, action: str, remedy: str) -> bool:
    """Ask on the terminal and return the answer.

    Args:
        question: what is asked.
        action: what cannot be done without an answer, for the error.
        remedy: how to do it without being asked.

    Raises:
        NotTrusted: standard input is no terminal, or ends without an answer.
    """
    from twinkle.errors import NotTrusted

    refused = NotTrusted(f"cannot {action}: there is no terminal to ask on; {remedy}")
    if not sys.stdin.isatty():
        raise refused
    try:
        return click.confirm(question, default=False)
    except click.Abort:
        click.echo()  # the question stands on a line that nobody ended
        raise refused from None

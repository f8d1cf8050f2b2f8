"""`python -m twinkle.cli` is the command `twinkle`."""

from twinkle.cli import main

main(prog_name="twinkle")

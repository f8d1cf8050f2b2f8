"""`python -m twinkle.cli` is the command `twinkle`."""

from twinkle.cli.group import main

main(prog_name="twinkle")

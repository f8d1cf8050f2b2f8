"""`python -m twinkle_cli` is the command `twinkle`."""

from twinkle_cli.group import main

main(prog_name="twinkle")

"""`python -m twinkle.cli` is the command `twinkle`."""

import sys
import warnings

# The registry may warn while it resolves `main`: print one line for each, like other notices of the command.
with warnings.catch_warnings(record=True) as notices:
    from twinkle.cli import main

for notice in notices:
    print(f"Warning: {notice.message}", file=sys.stderr)  # noqa: T201 - a command's own output

main(prog_name="twinkle")

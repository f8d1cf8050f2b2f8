"""What a component of kind tool_parser must keep."""

from twinkle.testing.contracts.case import Case


class tool_parserCase(Case):
    kind = "tool_parser"


CASE = tool_parserCase
CHECKS = ()

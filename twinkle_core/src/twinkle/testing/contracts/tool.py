"""What a component of kind tool must keep."""

from twinkle.testing.contracts.case import Case


class toolCase(Case):
    kind = "tool"


CASE = toolCase
CHECKS = ()

"""What a component of kind template must keep."""

from twinkle.testing.contracts.case import Case


class templateCase(Case):
    kind = "template"


CASE = templateCase
CHECKS = ()

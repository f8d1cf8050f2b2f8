"""What a component of kind hub must keep."""

from twinkle.testing.contracts.case import Case


class hubCase(Case):
    kind = "hub"


CASE = hubCase
CHECKS = ()

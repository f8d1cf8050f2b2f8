"""What a component of kind filter must keep."""

from twinkle.testing.contracts.case import Case


class filterCase(Case):
    kind = "filter"


CASE = filterCase
CHECKS = ()

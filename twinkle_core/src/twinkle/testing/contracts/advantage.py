"""What a component of kind advantage must keep."""

from twinkle.testing.contracts.case import Case


class advantageCase(Case):
    kind = "advantage"


CASE = advantageCase
CHECKS = ()

"""What a component of kind optimizer must keep."""

from twinkle.testing.contracts.case import Case


class optimizerCase(Case):
    kind = "optimizer"


CASE = optimizerCase
CHECKS = ()

"""What a component of kind scheduler must keep."""

from twinkle.testing.contracts.case import Case


class schedulerCase(Case):
    kind = "scheduler"


CASE = schedulerCase
CHECKS = ()

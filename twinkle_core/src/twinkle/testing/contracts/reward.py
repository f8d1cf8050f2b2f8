"""What a component of kind reward must keep."""

from twinkle.testing.contracts.case import Case


class rewardCase(Case):
    kind = "reward"


CASE = rewardCase
CHECKS = ()

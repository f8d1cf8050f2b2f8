"""What a component of kind rollout must keep."""

from twinkle.testing.contracts.case import Case


class rolloutCase(Case):
    kind = "rollout"


CASE = rolloutCase
CHECKS = ()

"""What a component of kind patch must keep."""

from twinkle.testing.contracts.case import Case


class patchCase(Case):
    kind = "patch"


CASE = patchCase
CHECKS = ()

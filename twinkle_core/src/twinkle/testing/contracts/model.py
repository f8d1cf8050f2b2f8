"""What a component of kind model must keep."""

from twinkle.testing.contracts.case import Case


class modelCase(Case):
    kind = "model"


CASE = modelCase
CHECKS = ()

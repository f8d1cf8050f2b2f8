"""What a component of kind env must keep."""

from twinkle.testing.contracts.case import Case


class envCase(Case):
    kind = "env"


CASE = envCase
CHECKS = ()

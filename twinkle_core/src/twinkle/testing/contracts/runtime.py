"""What a component of kind runtime must keep."""

from twinkle.testing.contracts.case import Case


class runtimeCase(Case):
    kind = "runtime"


CASE = runtimeCase
CHECKS = ()

"""What a component of kind kernel must keep."""

from twinkle.testing.contracts.case import Case


class kernelCase(Case):
    kind = "kernel"


CASE = kernelCase
CHECKS = ()

"""What a component of kind processor must keep."""

from twinkle.testing.contracts.case import Case


class processorCase(Case):
    kind = "processor"


CASE = processorCase
CHECKS = ()

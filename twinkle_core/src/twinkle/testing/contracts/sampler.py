"""What a component of kind sampler must keep."""

from twinkle.testing.contracts.case import Case


class samplerCase(Case):
    kind = "sampler"


CASE = samplerCase
CHECKS = ()

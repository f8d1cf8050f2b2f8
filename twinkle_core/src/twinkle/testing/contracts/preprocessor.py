"""What a component of kind preprocessor must keep."""

from twinkle.testing.contracts.case import Case


class preprocessorCase(Case):
    kind = "preprocessor"


CASE = preprocessorCase
CHECKS = ()

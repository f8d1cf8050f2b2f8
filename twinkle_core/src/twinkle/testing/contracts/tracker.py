"""What a component of kind tracker must keep."""

from twinkle.testing.contracts.case import Case


class trackerCase(Case):
    kind = "tracker"


CASE = trackerCase
CHECKS = ()

"""What a component of kind notifier must keep."""

from twinkle.testing.contracts.case import Case


class notifierCase(Case):
    kind = "notifier"


CASE = notifierCase
CHECKS = ()

"""What a component of kind checkpoint_engine must keep."""

from twinkle.testing.contracts.case import Case


class checkpoint_engineCase(Case):
    kind = "checkpoint_engine"


CASE = checkpoint_engineCase
CHECKS = ()

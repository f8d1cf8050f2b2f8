"""What a component of kind dataset must keep."""

from twinkle.testing.contracts.case import Case


class datasetCase(Case):
    kind = "dataset"


CASE = datasetCase
CHECKS = ()

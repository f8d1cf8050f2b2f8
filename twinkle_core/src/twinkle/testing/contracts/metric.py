"""What a component of kind metric must keep."""

from twinkle.testing.contracts.case import Case


class metricCase(Case):
    kind = "metric"


CASE = metricCase
CHECKS = ()

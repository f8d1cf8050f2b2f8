"""What a component of kind loss_scale must keep."""

from twinkle.testing.contracts.case import Case


class loss_scaleCase(Case):
    kind = "loss_scale"


CASE = loss_scaleCase
CHECKS = ()

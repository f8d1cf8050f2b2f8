"""What a component of kind dataloader must keep."""

from twinkle.testing.contracts.case import Case


class dataloaderCase(Case):
    kind = "dataloader"


CASE = dataloaderCase
CHECKS = ()

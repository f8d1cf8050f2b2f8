"""What a component of kind recipe must keep."""

from twinkle.testing.contracts.case import Case


class recipeCase(Case):
    kind = "recipe"


CASE = recipeCase
CHECKS = ()

"""Losses under the names and by the formulas that the Tinker protocol publishes: plain sums over tokens and rows."""

"""The contract kit: the checks that every implementation of a kind must pass, one module for each kind."""

from twinkle_testing.contracts.report import CheckResult, ContractError, Report
from twinkle_testing.contracts.running import Contract, check_component, checks_for, examine

__all__ = ["CheckResult", "Contract", "ContractError", "Report", "check_component", "checks_for", "examine"]

"""The contract kit: for each kind of component the checks that any implementation must pass, one module a kind."""

from twinkle_testing.contracts.report import CheckResult, ContractError, Report
from twinkle_testing.contracts.running import Contract, check_component, checks_for, examine

__all__ = ["CheckResult", "Contract", "ContractError", "Report", "check_component", "checks_for", "examine"]

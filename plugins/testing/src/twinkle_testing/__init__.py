"""Helpers for tests of Twinkle and of its plugins: tiny models, a fake hub, and the contract kit."""

from twinkle_testing.contracts import CheckResult, Contract, ContractError, Report, check_component, checks_for
from twinkle_testing.fakehub import FakeHub
from twinkle_testing.models import CHATML, tiny_config, tiny_model, tiny_tokenizer

__all__ = [
    "CHATML",
    "CheckResult",
    "Contract",
    "ContractError",
    "FakeHub",
    "Report",
    "check_component",
    "checks_for",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
]

# Written by `twinkle plugins types`; do not edit.
"""Testing: the contract kit, tiny models and the fake hub, for tests of Twinkle and of its plugins."""

from twinkle._registry import lazy_names


from twinkle_testing.contracts import CheckResult as CheckResult
from twinkle_testing.contracts import Contract as Contract
from twinkle_testing.contracts import ContractError as ContractError
from twinkle_testing.contracts import Report as Report
from twinkle_testing.contracts import check_component as check_component
from twinkle_testing.contracts import checks_for as checks_for
from twinkle_testing.fakehub import FakeHub as FakeHub
from twinkle_testing.models import CHATML as CHATML
from twinkle_testing.models import tiny_config as tiny_config
from twinkle_testing.models import tiny_model as tiny_model
from twinkle_testing.models import tiny_tokenizer as tiny_tokenizer

"""A request as the SDK's own codec wrote it."""

import pytest

REQUEST = bytes.fromhex(
    "0a016d10011a640a100a0e0a0c01000000020000000300000012300a0d7461726765745f746f6b656e73121f0a1802000000000000000300"
    "00000000000004000000000000001802220103121e0a077765696768747312130a0c000000000000803f0000803f1801220103220d63726f"
    "73735f656e74726f7079"
)


@pytest.fixture
def golden_request() -> bytes:
    """Model "m", number 1, tokens 1 2 3, targets 2 3 4, weights 0 1 1, cross_entropy."""
    return REQUEST

"""Options of the engine that are settings of the service itself are refused."""

from pathlib import Path

import pytest

from twinkle.errors import ConfigError
from twinkle_server.engine.__main__ import make_executor
from twinkle_server.settings import Settings


def test_an_option_that_is_a_setting_of_the_service_is_refused(tmp_path: Path) -> None:
    settings = Settings("model", tmp_path, loss_workers=False, extra={"pass_tokens": 7, "other": 1})
    with pytest.raises(ConfigError, match=r"^engine\.options must not contain pass_tokens: "):
        make_executor(settings)

"""Settings travel to the engine as JSON and come out as they were."""

from pathlib import Path

from twinkle_server.settings import Limits, Settings, Times


def test_settings_survive_the_journey() -> None:
    settings = Settings(
        "model", Path("/data"), losses=("a", "b"), limits=Limits(datums=3), times=Times(poll=0.5), extra={"slow": 0.1}
    )
    assert Settings.parse(settings.dump()) == settings
    assert Settings.parse(Settings("m", Path("/d")).dump()).losses is None

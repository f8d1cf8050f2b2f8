"""The plugin is found."""

import twinkle


def test_the_plugin_is_found() -> None:
    assert "twinkle-scaffolds" in {record.name for record in twinkle.registry().records if record.status == "ok"}

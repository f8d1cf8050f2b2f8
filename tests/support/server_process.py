"""Serves with settings that the command line does not offer: a JSON object as the only argument."""

import json
import sys
from pathlib import Path
from typing import Any

from twinkle_server.data.limits import DataLimits
from twinkle_server.settings import Limits, Rollouts, Settings, Times


def settings_of(fields: dict[str, Any]) -> Settings:
    """Return settings from plain fields."""
    fields = dict(fields, data=Path(fields["data"]))
    for name, made in (("limits", Limits), ("times", Times), ("rollouts", Rollouts), ("datasets", DataLimits)):
        if name in fields:
            fields[name] = made(**fields[name])
    if "losses" in fields:
        fields["losses"] = tuple(fields["losses"])
    return Settings(**fields)


if __name__ == "__main__":
    from twinkle_server.serve import serve

    sys.exit(serve(settings_of(json.loads(sys.argv[1]))))

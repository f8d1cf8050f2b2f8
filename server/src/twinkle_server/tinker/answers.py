"""Bodies of answers."""

from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import Response

from twinkle_server.operations import Accepted


def answer(body: Any, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def promise(accepted: Accepted, **more: Any) -> Response:
    """Return the answer to an operation that was accepted: the id of its future."""
    return answer({"request_id": accepted.request, **more})


def present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def moment(seconds: float) -> str:
    """Return a time (UTC seconds) as clients read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

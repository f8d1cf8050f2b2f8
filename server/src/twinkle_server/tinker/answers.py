"""Bodies of answers, whole and in pages."""

from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from fastapi import Query, Response

from twinkle_server.operations import Accepted
from twinkle_server.store.records import Page


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


Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**53)]


def cursor(page: Page[Any], limit: int, offset: int) -> dict[str, int]:
    """Return where in a list a page is."""
    return {"offset": offset, "limit": limit, "total_count": page.total}

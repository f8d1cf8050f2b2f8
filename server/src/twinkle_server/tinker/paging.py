"""Parts of lists, by limit and offset."""

from typing import Annotated, Any

from fastapi import Query

from twinkle_server.store.records import Page

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**53)]


def cursor(page: Page[Any], limit: int, offset: int) -> dict[str, int]:
    """Return where in a list a page is."""
    return {"offset": offset, "limit": limit, "total_count": page.total}

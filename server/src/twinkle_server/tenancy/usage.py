"""What tenants used, gathered in memory and added to the day's rows from time to time."""

import time
from collections import Counter
from collections.abc import Mapping

from twinkle_server.store.records import Usage
from twinkle_server.store.usage import UsageTable, day_of

KINDS: Mapping[str, str] = {"forward": "training", "forward_backward": "training", "sample": "sampling_sample"}
"""Kinds of usage by kind of operation; others cost nothing."""


class UsageLog:
    """Adds up tokens of operations that are done; a crash loses what came since the last `flush`."""

    def __init__(self, table: UsageTable) -> None:
        self._table = table
        self._tokens: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, tokens: int, tenant: str) -> None:
        """Count an operation that is done."""
        if tokens and (name := KINDS.get(kind)):
            self._tokens[tenant, day_of(time.time()), name] += tokens

    async def flush(self) -> None:
        """Write what was gathered; what was not written is kept, and what may have been (at the end) is not."""
        gathered, self._tokens = self._tokens, Counter()
        if not gathered:
            return
        rows = [Usage(tenant, day, kind, tokens) for (tenant, day, kind), tokens in gathered.items()]
        try:
            await self._table.add_all(rows)
        except Exception:
            self._tokens.update(gathered)
            raise

"""Which prompt tokens a step reads: short prompts first, without starving long ones, and in equal shares of owners."""

from collections.abc import Sequence

from twinkle_transformers.sampling.requests import Request

_OLDEST = 4
"""The oldest prompt gets at least this fraction of the tokens of a step, so that it is never starved."""


def shared(readers: Sequence[Request], budget: int) -> dict[Request, int]:
    """Return how many tokens of each prompt a step reads, at most `budget` together.

    A quarter is for the oldest prompt. The owners of the others, told apart by their salts, get equal shares of the
    rest, and what an owner does not need is for the others. Each share goes to the owner's shortest prompts first, so
    that the first token of a short prompt does not wait for the end of a long one, and few prompts are cut.

    Args:
        readers: requests whose prompts are not read completely, in order of arrival.
        budget: maximum number of tokens.
    """
    counts = dict.fromkeys(readers, 0)
    if not readers:
        return counts
    counts[readers[0]] = min(max(1, budget // _OLDEST), _left(readers[0]), budget)
    budget -= counts[readers[0]]
    owners: dict[str | None, list[Request]] = {}
    for request in readers:
        owners.setdefault(request.cache_salt, []).append(request)
    needs = {owner: sum(_left(r) - counts[r] for r in requests) for owner, requests in owners.items()}
    for place, owner in enumerate(sorted(needs, key=needs.__getitem__)):
        share = min(needs[owner], budget // (len(needs) - place))
        budget -= share
        for request in sorted(owners[owner], key=_left):
            more = min(share, _left(request) - counts[request])
            counts[request] += more
            share -= more
    return counts


def whole(readers: Sequence[Request], size: int, first: Request | None = None) -> dict[Request, int]:
    """Return how many tokens of each prompt a step reads, where a prompt is always cut at the same places.

    Prompts are cut at multiples of `size`, whatever is read beside them, so that the rounding of their numbers does not
    depend on it. Whole pieces are taken, of the shortest prompts first, as long as they have at most `size` tokens
    together.

    Args:
        readers: see `shared`.
        size: number of tokens of a piece.
        first: begin with this prompt; the oldest one, where the last step did not read it.
    """
    counts = dict.fromkeys(readers, 0)
    budget = size
    for request in sorted(readers, key=lambda request: (request is not first, _left(request))):
        piece = min(_left(request), size - request.read % size)
        if piece <= budget:
            counts[request] = piece
            budget -= piece
    return counts


def _left(request: Request) -> int:
    return len(request.prompt.ids) - request.read

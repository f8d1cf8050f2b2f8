"""What a prompt begins with in common with those that have slots, and that it need therefore not read itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinkle_transformers.sampling.prefixes import BLOCK
from twinkle_transformers.sampling.requests import Request


@dataclass(slots=True)
class Head:
    """The beginning that a prompt shares.

    Attributes:
        source: whose slots have most of it; None where that is less than a block.
        tokens: of it that are there to be copied.
        coming: tokens of it that will be there once every prompt is read.
    """

    source: Request | None = None
    tokens: int = 0
    coming: int = 0

    @property
    def grows(self) -> bool:
        """Whether it is worth waiting for: a step costs about what a block costs."""
        return self.coming - self.tokens >= BLOCK


def shared_head(request: Request, others: Iterable[Request]) -> Head:
    """Return what others have, or will have, of a prompt's beginning, no more of it than `usable`.

    What a prompt that is being read has read itself does not count yet: a NaN in what follows, which its logits will
    show, spoils it too.

    Args:
        request: the prompt.
        others: requests that have slots; only those of the same adapter count.
    """
    tokens, most = request.prompt.ids, usable(request)
    head = Head()
    for other in others:
        if head.tokens == most:
            break
        if other.key != request.key or other.stale or other.over:
            continue
        if tokens[head.tokens : head.tokens + 1] != other.prompt.ids[head.tokens : head.tokens + 1]:
            continue  # no longer than what was found
        count = common(tokens, other.prompt.ids, most)
        head.coming = max(head.coming, count)
        there = min(count, other.known) if other.reading else count
        if there > head.tokens:
            head.source, head.tokens = other, there
    return head if head.tokens >= BLOCK else Head(coming=head.coming)


def usable(request: Request) -> int:
    """Return how many tokens a prompt may begin with unread: none that is scored, and the last is always read."""
    return min(request.prompt.scores.first, len(request.prompt.ids) - 1)


def common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return with how many equal tokens two prompts begin, `most` of them at most."""
    count, most = 0, min(most, len(one), len(other))
    for size in (256, 16, 1):  # slices compare faster than tokens
        while count + size <= most and one[count : count + size] == other[count : count + size]:
            count += size
    return count

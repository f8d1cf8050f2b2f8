"""Requests of an engine, and their sequences while they run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from twinkle.data_format import SamplingParams
from twinkle_transformers.generation import Draft, Generated, Prompt
from twinkle_transformers.stopping import StopRule
from twinkle_transformers.versions import AdapterVersion


@dataclass(slots=True, eq=False)
class Place:
    """A slot of the store that is taken; whoever tidies the store changes `slot`."""

    slot: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its samples.

    Attributes:
        prompt: its tokens, its row in the call, and how many tokens each sample may have.
        params: how to draw.
        stop: what ends a sample.
        seed: of the noise; a list has one for each sample.
        version: the adapter, None for the base model.
        result: what is known so far.
        read: prompt tokens that are in the store.
        known: prompt tokens that were there of other prompts.
        places: slots that begin with the prompt.
        idle: those of them that no sample runs in.
        pending: samples that have a first token and no slot.
        error: why it failed.
        done: whether nothing more will come.
        cancelled: whether nobody wants it any more.
        stale: whether what it has in the store is not what a prompt that begins now would have.
    """

    prompt: Prompt
    params: SamplingParams
    stop: StopRule
    seed: int | Sequence[int]
    version: AdapterVersion | None
    result: Generated = field(init=False)
    read: int = 0
    known: int = 0
    places: list[Place] = field(default_factory=list)
    idle: list[Place] = field(default_factory=list)
    pending: deque[Draft] = field(default_factory=deque)
    error: Exception | None = None
    done: bool = False
    cancelled: bool = False
    stale: bool = False

    def __post_init__(self) -> None:
        row, room = self.prompt.row, self.prompt.room
        self.result = Generated([Draft(row, n, room, self.stop.watch()) for n in range(self.params.num_samples)])

    @property
    def reading(self) -> bool:
        """Whether some of the prompt is not in the store."""
        return self.read < len(self.prompt.ids)

    @property
    def key(self) -> str:
        """Says whose keys and values its prompt has: those of an adapter's exact weights, "" for the base model."""
        return "" if self.version is None else self.version.key

    @property
    def over(self) -> bool:
        """Whether it failed or is not wanted any more."""
        return self.cancelled or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether everything that was asked for is there."""
        if self.prompt.room == 0:
            return not self.reading
        return all(draft.reason is not None for draft in self.result.drafts)

    @property
    def most(self) -> int:
        """Tokens that one of its sequences may have in the store."""
        return len(self.prompt.ids) + max(0, self.prompt.room - 1)

    @property
    def drawing(self) -> tuple[float, ...]:
        """What decides how tokens are drawn: rows that agree in it are drawn together."""
        p = self.params
        scores = p.logprobs or 0, p.topk_logprobs, p.sampled_logprobs, p.raw_logprobs
        return p.temperature, p.top_k, p.top_p, p.repetition_penalty, *scores


@dataclass(slots=True, eq=False)
class Running:
    """A sample that has a slot.

    Attributes:
        request: whose it is.
        draft: the sample.
        place: its slot.
    """

    request: Request
    draft: Draft
    place: Place

    @property
    def length(self) -> int:
        """Tokens that its slot has: all but the last that was drawn, which is the next to read."""
        return len(self.request.prompt.ids) + len(self.draft.tokens) - 1

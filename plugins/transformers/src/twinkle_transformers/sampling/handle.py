"""What a caller holds of a request: its tokens as they come, its result, and the way to stop it."""

from collections.abc import Callable, Iterator
from typing import Protocol

from twinkle.data_format import SampleResponse, StopReason
from twinkle.engine import SampledTokens
from twinkle.errors import ArgumentError
from twinkle_transformers.generation import Draft
from twinkle_transformers.sampling.requests import Request
from twinkle_transformers.stopping import TextStream


class Server(Protocol):
    """Whoever serves requests."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Work, or wait, until something is so."""

    def cancel(self, request: Request) -> None:
        """Stop a request."""


class SampleHandle:
    """One prompt that is being sampled. Whoever waits for it works for all requests of the sampler.

    May be used from several threads. A handle that nobody waits for goes on only while somebody waits for another.
    """

    def __init__(self, request: Request, server: Server, respond: Callable[[Request], SampleResponse]) -> None:
        self._request, self._server, self._respond = request, server, respond

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._request.done

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._request.error

    def tokens(self, sample: int = 0) -> Iterator[int]:
        """Yield the tokens of a sample as they are drawn.

        Args:
            sample: its number.

        Raises:
            ArgumentError: there is no such sample.
            NonFiniteError: the model's logits are NaN.
        """
        for _, tokens, _ in self._grow(sample):
            yield from tokens

    def text(self, sample: int = 0) -> Iterator[tuple[str, StopReason | None]]:
        """Yield what each token adds to the text of a sample, and why it ended with the last one (None before).

        The pieces together are `decoded` of the result: without special tokens, and nothing of a stop string.

        Args:
            sample: its number.
        """
        stream = TextStream(self._request.stop)
        for draft, tokens, reason in self._grow(sample):
            added = "".join(stream.add(token) for token in tokens)
            if reason is not None:
                yield added + stream.finish(draft.tokens), reason
            elif added:
                yield added, None

    def progress(self, sample: int = 0, start: int = 0) -> SampledTokens:
        """Return what has been drawn so far, without computing anything.

        Args:
            sample: index of the sample.
            start: number of tokens to leave out.

        Raises:
            ArgumentError: there is no such sample.
            NonFiniteError: the model's logits are NaN.
        """
        self._check()
        draft = self._draft(sample)
        tokens = draft.tokens[start:]
        logprobs = [pairs[0][1] for pairs in draft.logprobs[start : start + len(tokens)] if pairs]
        return SampledTokens(tokens, logprobs, draft.reason)

    def result(self) -> SampleResponse:
        """Wait for all samples and return them; those that were cancelled end with the reason "abort".

        Raises:
            NonFiniteError: the model's logits are NaN.
        """
        self._server.drive(lambda: self._request.done)
        self._check()
        return self._respond(self._request)

    def cancel(self) -> None:
        """Stop; what was drawn stays. Does nothing when it is done."""
        if not self._request.done:
            self._server.cancel(self._request)

    def _draft(self, sample: int) -> Draft:
        drafts = self._request.result.drafts
        if not 0 <= sample < len(drafts):
            raise ArgumentError(f"sample {sample} of a request with {len(drafts)} samples; they count from 0")
        return drafts[sample]

    def _grow(self, sample: int) -> Iterator[tuple[Draft, list[int], StopReason | None]]:
        """Yield the draft, its new tokens, and with the last of them why it ended."""
        seen = 0

        def more() -> bool:
            draft = self._draft(sample)
            return len(draft.tokens) > seen or draft.reason is not None or self._request.done

        self._draft(sample)
        while True:
            self._server.drive(more)
            self._check()
            draft = self._draft(sample)
            reason, tokens = draft.reason, draft.tokens[seen:]
            seen += len(tokens)
            yield draft, tokens, reason
            if reason is not None:
                return

    def _check(self) -> None:
        if self._request.error is not None:
            raise self._request.error

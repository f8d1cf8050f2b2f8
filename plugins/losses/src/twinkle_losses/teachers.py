"""A teacher's distributions in the forms in which they come: whole logits, or its k most probable tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.errors import ArgumentError, DataError
from twinkle_losses.divergence import Events
from twinkle_losses.options import Rest
from twinkle_torch import tables
from twinkle_torch.head import wide
from twinkle_torch.trained import Trained


@dataclass(frozen=True, slots=True)
class WholeTeacher:
    """Every token is a separate event.

    Attributes:
        take: gives the logits `[n, V]` of some of the trained tokens.
        temperature: divides them.
    """

    take: Callable[[slice], Tensor]
    temperature: float

    def events(self, part: slice, z: Tensor) -> Events:
        """See `Teacher`."""
        return Events(z.log_softmax(-1), self.log_probs(part, z))

    def log_probs(self, part: slice, z: Tensor) -> Tensor:
        """Return the teacher's log-probabilities `[n, V]`, on the device and in the dtype of `z`."""
        logits = self.take(part).to(z.device, z.dtype)
        return (logits if self.temperature == 1 else logits / self.temperature).log_softmax(-1)


@dataclass(frozen=True, slots=True)
class TopTeacher:
    """The k tokens that the teacher finds most probable, and all others as one event, or left out.

    Attributes:
        take: gives log-probabilities and tokens, `[n, k]` each, of some of the trained tokens, and the
            log-probability of all other tokens together, `[n, 1]`.
        rest: "bucket" makes the others one event; "renormalize" takes both distributions as they are on the k tokens.
    """

    take: Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]]
    rest: Rest

    def events(self, part: slice, z: Tensor) -> Events:
        """See `Teacher`."""
        log_t, tokens, others = self.take(part, z)
        if self.rest == "renormalize" or tokens.shape[1] == z.shape[1]:
            return Events(z.gather(-1, tokens).log_softmax(-1), log_t.log_softmax(-1), tokens)
        log_s = z.log_softmax(-1)
        seen = torch.cat([log_s.gather(-1, tokens), others_of(log_s, tokens)], -1)
        return Events(seen, torch.cat([log_t, others], -1), tokens, rest=True)


def others_of(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability `[n, 1]` of all tokens but some: `log_p` `[n, V]`, `tokens` int64 `[n, k]`."""
    return log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)


def whole_teacher(name: str, value: Any, where: Trained, vocabulary: int, temperature: float) -> WholeTeacher:
    """Read whole logits: `[B, T, V]`, or a list with `[n, V]` a row.

    Raises:
        ArgumentError: they do not fit; names the row and the sizes.
    """
    take, width = tables.trained_lines(name, value, where)
    if width != vocabulary:
        raise ArgumentError(
            f"{where.loss}: {name} are over {width} tokens, the student's logits over {vocabulary}; both need one "
            f"tokenizer (if only the padding of the vocabulary differs, cut it: [..., :{vocabulary}])"
        )
    return WholeTeacher(take, temperature)


def top_of_whole(teacher: WholeTeacher, k: int, vocabulary: int, rest: Rest, loss: str) -> TopTeacher:
    """Return a teacher that distinguishes only its `k` most probable tokens.

    Raises:
        ArgumentError: `k` is no number of tokens.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= vocabulary:
        raise ArgumentError(
            f"{loss}: topk={k!r}; it must be a whole number from 1 to the vocabulary's size, {vocabulary}"
        )

    def take(part: slice, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_t = teacher.log_probs(part, z)
        best = log_t.topk(k, dim=-1)
        return best.values, best.indices, others_of(log_t, best.indices)

    return TopTeacher(take, rest)


def top_teacher(logprobs: Any, tokens: Any, where: Trained, vocabulary: int, rest: Rest) -> TopTeacher:
    """Read the k most probable tokens: log-probabilities and tokens, `[B, T, k]`, or lists with `[n, k]` a row.

    Raises:
        ArgumentError: they do not fit each other, the batch or the vocabulary, or name a token twice.
    """
    names = ("teacher_topk_logprobs", "teacher_topk_indices")
    take_logprobs, k = tables.trained_lines(names[0], logprobs, where)
    take_tokens, count = tables.trained_lines(names[1], tokens, where)
    if count != k or not 1 <= k <= vocabulary:
        raise ArgumentError(
            f"{where.loss}: {names[0]} have {k} entries a token and {names[1]} {count}; both need the same number, "
            f"from 1 to the vocabulary's size, {vocabulary}"
        )
    everything = slice(0, sum(where.counts))
    given, ids = take_logprobs(everything), _whole_numbers(take_tokens(everything), vocabulary, names[1], where)
    given = given.to(wide(given.dtype) if given.is_floating_point() else torch.float32)
    # A rest below this cannot be distinguished from 0 in this precision, and its logarithm has no meaning.
    least = torch.finfo(given.dtype).eps
    others = (1 - given.double().exp().sum(-1, keepdim=True)).clamp(min=least).log()
    _check_sums(given, names[0], where)

    def take(part: slice, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return given[part].to(z), ids[part].to(z.device), others[part].to(z)

    return TopTeacher(take, rest)


def _whole_numbers(ids: Tensor, vocabulary: int, name: str, where: Trained) -> Tensor:
    """Return tokens as int64, each once and in the vocabulary."""
    if ids.is_floating_point():
        raise ArgumentError(f"{where.loss}: {name} are {ids.dtype} numbers; give tokens, whole numbers")
    ids = ids.long()
    ordered = ids.sort(-1).values
    bad = ((ids < 0) | (ids >= vocabulary)).any(-1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if not bool((bad | twice).any()):
        return ids
    at = int((bad | twice).nonzero()[0])
    wrong = f"a token outside the student's vocabulary of {vocabulary}" if bool(bad[at]) else "a token twice"
    raise ArgumentError(
        f"{where.loss}: {name} of {_place(where, at)} hold {wrong} ({ids[at].tolist()!s:.60}); give k different tokens"
    )


def _check_sums(given: Tensor, name: str, where: Trained) -> None:
    sums = given.exp().sum(-1)
    if bool((sums > 1.01).any()):  # NaN is detected and reported where the loss is computed
        at = int((sums > 1.01).nonzero()[0])
        raise ArgumentError(
            f"{where.loss}: {name} of {_place(where, at)} are no log-probabilities, their probabilities sum to "
            f"{float(sums[at]):.3g}; give the teacher's log-soft-max at these tokens (not its logits)"
        )


def check_numbers(teacher: WholeTeacher | TopTeacher, values: Tensor, z: Tensor, where: Trained) -> None:
    """Report whether the NaN came from the teacher or from the student.

    Args:
        teacher: which.
        values: `[N]`, what was computed with it.
        z: `[1, V]`, any logits that are numbers.
        where: the trained tokens.

    Raises:
        DataError: the teacher has NaN at a trained token; names the place.
    """
    for at in values.isnan().nonzero().flatten().tolist():
        if bool(teacher.events(slice(at, at + 1), z).log_t.isnan().any()):
            raise DataError(
                f"{where.loss}: what the teacher says of {_place(where, at)} is not a number (NaN); look at its "
                "forward (a precision that overflows, a row without tokens), or leave the row out"
            )


def _place(where: Trained, at: int) -> str:
    row, column = where.mask.nonzero()[at].tolist()
    return f"row {row} at position {column}"

"""GKD: distillation from a teacher's whole distributions, or from its most probable tokens."""

from typing import TYPE_CHECKING, Any, get_args

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.errors import ArgumentError, DataError
from twinkle.loss import Loss
from twinkle_losses.options import Rest, label_to_ignore, number, output, whole
from twinkle_torch.trained import Trained

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle_losses.teachers import TopTeacher, WholeTeacher


class GKDLoss(Loss):
    """Generalized knowledge distillation: how far student and teacher are apart, averaged over the tokens of the step.

    With s and t the student's and the teacher's next-token distributions at a trained token, both at `temperature`,
    and m = beta t + (1 - beta) s, the token's term is (GKD, arXiv:2306.13649, eq. 1)

    - beta = 0: KL(t || s), the forward divergence, which covers all that the teacher would say
    - beta = 1: KL(s || t), the reverse one, which stays with what the teacher finds probable
    - else: beta KL(t || m) + (1 - beta) KL(s || m), the generalized Jensen-Shannon divergence

    `loss_sum` is the sum over trained tokens (times `loss_scale`, where the batch has it), `denominator` their number.
    Nothing is multiplied by the square of the temperature. Whether rows are the teacher's, a data set's (off-policy) or
    the student's own samples (on-policy) is the loop's affair.

    For a teacher given by its k most probable tokens, `rest` defines the treatment of the other tokens:

    - "bucket": they are one event, with the probability that is left. The divergence is exact for these k + 1 events,
      never above that of the whole distributions, and equal to it where k is the vocabulary.
    - "renormalize": both distributions are taken as they are on the k tokens. What the student does elsewhere is free.

    `metrics`, sums over tokens as well: `kl` (KL(t || s)) and `reverse_kl` (KL(s || t)) over the same events.

    Args:
        beta: which divergence, in [0, 1].
        temperature: divides the student's logits and `teacher_logits`, above 0. Log-probabilities of a teacher are
            taken as they come: make them at this temperature (`forward_only(temperature=...)`). The student's forward
            keeps its temperature of 1.
        ignore_index: a label that is not trained, in addition to -100.
        chunk_size: tokens to compare at one time. This takes about `10 * chunk_size * V` float32 values in addition to
            the logits that are given and their gradient.
        rest: see above.

    Raises:
        ArgumentError: an option is outside its range.
    """

    require_logps = False
    require_logits = True

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = -100,
        chunk_size: int = 512,
        *,
        rest: Rest = "bucket",
    ) -> None:
        self.beta = number(self, "beta", beta, least=0)
        if self.beta > 1:
            raise ArgumentError(f"GKDLoss: beta={beta!r}; it must be a number in [0, 1]")
        self.temperature = number(self, "temperature", temperature, above=0)
        self.ignore_index = label_to_ignore(self, ignore_index)
        self.chunk_size = whole(self, "chunk_size", chunk_size, least=1)
        if rest not in get_args(Rest):
            raise ArgumentError(f"GKDLoss: rest={rest!r}; it must be one of {', '.join(get_args(Rest))}")
        self.rest: Rest = rest

    def __call__(
        self,
        inputs: InputBatch,
        outputs: ModelOutput,
        teacher_logits: Any = None,
        teacher_topk_logprobs: Any = None,
        teacher_topk_indices: Any = None,
        topk: int | None = None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        The teacher comes in one of two forms, each a tensor `[B, T, ...]` (T of the batch, or more), or a list with a
        table a row, which has as many lines as the row has trained tokens, or tokens, or T and more. What stands where
        nothing is trained is never read.

        Args:
            inputs: `labels` int64 `[B, T]`; optional `loss_scale` float32 `[B, T]`.
            outputs: `logits` `[B, T, V]` of the student.
            teacher_logits: `[B, T, V]`: what `forward_only(return_logits=True)` of the teacher gives for these rows.
            teacher_topk_logprobs: `[B, T, k]`: log-probabilities of the k tokens that the teacher finds most probable
                (`forward_only(topk_logprobs=k)` gives them as `topk_logprobs`).
            teacher_topk_indices: int64 `[B, T, k]`: these tokens (`topk_indices`).
            topk: take only so many of `teacher_logits`, the most probable ones.

        Raises:
            ArgumentError: the teacher is missing, comes in both forms, or does not fit rows or vocabulary.
            DataError: the teacher's numbers are NaN at a trained token.
            TrainingStateError: the forward was of another task.
        """
        import torch

        from twinkle_losses.divergence import Divergence
        from twinkle_losses.teachers import check_numbers

        logits = output(outputs, "logits", self, "call with task='causal_lm', on rows with labels")
        if logits.dim() != 3:
            raise DataError(f"GKDLoss: logits are {list(logits.shape)}; it needs a model that gives [B, T, V]")
        where = Trained.of(inputs, logits[..., 0], self.ignore_index, self)
        teacher = self._teacher(where, logits, teacher_logits, teacher_topk_logprobs, teacher_topk_indices, topk)
        rows, columns = where.mask.nonzero(as_tuple=True)
        values, kl, reverse = Divergence.apply(  # type: ignore[no-untyped-call]
            logits, rows, columns, teacher, self.beta, self.temperature, self.chunk_size
        )
        sums = torch.stack([values.detach().sum(), kl.sum(), reverse.sum()]).tolist()
        if teacher is not None and any(total != total for total in sums):
            check_numbers(teacher, kl, values.new_zeros(1, logits.shape[-1]), where)
        if (scale := inputs.get("loss_scale")) is not None:
            values = values * scale.to(values)[rows, columns]
        return LossOutput(values.sum(), sum(where.counts), {"kl": sums[1], "reverse_kl": sums[2]})

    def _teacher(
        self, where: Trained, logits: "Tensor", whole: Any, logprobs: Any, tokens: Any, topk: int | None
    ) -> "WholeTeacher | TopTeacher | None":
        """Return the teacher in the form in which it came; None where nothing is trained, so that nothing is asked."""
        from twinkle_losses.teachers import top_of_whole, top_teacher, whole_teacher

        given = {"teacher_logits": whole, "teacher_topk_logprobs": logprobs, "teacher_topk_indices": tokens}
        names = [name for name, value in given.items() if value is not None]
        vocabulary = logits.shape[-1]
        if names not in (["teacher_logits"], ["teacher_topk_logprobs", "teacher_topk_indices"]):
            raise ArgumentError(
                f"{where.loss}: the teacher came as {' and '.join(names) or 'nothing'}; pass either teacher_logits= "
                "(what forward_only(return_logits=True) of the teacher gave for the same rows), or both "
                "teacher_topk_logprobs= and teacher_topk_indices= (forward_only(topk_logprobs=k) gives them)"
            )
        if whole is None and topk is not None:
            raise ArgumentError(
                f"{where.loss}: topk={topk} cuts teacher_logits, but the teacher came as teacher_topk_logprobs; leave "
                "topk out"
            )
        if not any(where.counts):
            return None
        if whole is None:
            return top_teacher(logprobs, tokens, where, vocabulary, self.rest)
        teacher = whole_teacher("teacher_logits", whole, where, vocabulary, self.temperature)
        return teacher if topk is None else top_of_whole(teacher, topk, vocabulary, self.rest, where.loss)

"""SimPO: preferences by mean log-probabilities, with a margin and without a reference."""

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss
from twinkle_losses.aligning import Trained
from twinkle_losses.options import label_to_ignore, number
from twinkle_losses.outputs import output
from twinkle_losses.pairs import Pairs, logp_numbers, reward_numbers, weigh


class SimPOLoss(Loss):
    """Preference loss over pairs of rows `[chosen 0, rejected 0, chosen 1, rejected 1, ...]`, averaged over the pairs.

    With c and r the mean of logp_t over the trained tokens of the chosen and of the rejected row, and s the logistic
    function, a pair's term is (SimPO, arXiv:2405.14734, eq. 6)

        -log s( beta (c - r) - gamma )

    Where the batch has `loss_scale`, it multiplies logp_t, and the number of tokens stays. `loss_sum` is the sum over
    pairs, `denominator` the number of pairs that train something: a pair of which neither row has a trained token
    counts nothing.

    `metrics`, sums over pairs as well: `rewards/chosen` (beta c), `rewards/rejected` (beta r), `rewards/margins`
    (beta (c - r), before gamma is taken off), `rewards/accuracies` (1 where c > r), `logps/chosen` and
    `logps/rejected` (sums of the rows' log-probabilities).

    Args:
        beta: scale of the rewards, above 0.
        gamma: by how much the chosen row's reward shall lead, at least 0.
        ignore_index: a label that is not trained, beside -100, which never is.

    Raises:
        ArgumentError: an option is outside its range.
    """

    rows_together = 2

    def __init__(self, beta: float = 2.5, gamma: float = 0.5, ignore_index: int = -100) -> None:
        self.beta = number(self, "beta", beta, above=0)
        self.gamma = number(self, "gamma", gamma, least=0)
        self.ignore_index = label_to_ignore(self, ignore_index)

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        """Compute the loss of one micro-batch of whole pairs.

        Args:
            inputs: `labels` int64 `[B, T]`, B even; optional `loss_scale` float32 `[B, T]`.
            outputs: `logps` float32 `[B, T]`.

        Raises:
            ArgumentError: B is odd.
            DataError: only one row of a pair has trained tokens.
            TrainingStateError: the forward was of another task.
        """
        from torch.nn.functional import logsigmoid

        logps = output(outputs, "logps", self, "call with task='causal_lm', on rows with labels")
        where = Trained.of(inputs, logps, self.ignore_index, self)
        pairs = Pairs.of(where)
        scores = weigh(where.fill(logps), inputs)
        chosen, rejected = pairs.split(where.means(scores))
        terms = -logsigmoid(self.beta * (chosen - rejected) - self.gamma)
        numbers = reward_numbers(self.beta, chosen, rejected) | logp_numbers(*pairs.split(scores.sum(1)))
        return LossOutput(pairs.total(terms), pairs.count, pairs.numbers(numbers))

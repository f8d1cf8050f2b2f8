"""The loss head against plain log-softmax in float64: values, gradients, every transform, every kind of head."""

import itertools

import pytest
import torch
from torch import nn

from twinkle.torch.head import LogitTransform, score_tokens

CASES = list(itertools.product((True, False), (None, 3.0), (1.0, 0.5), (1.0, 0.7), (False, True), (False, True)))


@pytest.mark.parametrize(("frozen", "softcap", "scale", "temperature", "bias", "entropies"), CASES)
def test_scores_and_gradients_equal_plain_log_softmax(
    frozen: bool, softcap: float | None, scale: float, temperature: float, bias: bool, entropies: bool
) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 13, bias=bias).double().requires_grad_(not frozen)
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (7,))
    a, b = torch.randn(2, 7, dtype=torch.float64)
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]

    transform = LogitTransform(scale, softcap, temperature)
    scores = score_tokens(
        hidden, targets, head, transform=transform, entropies=entropies, predictions=True, chunk_tokens=3
    )
    ours = (scores.logps * a).sum()
    logits = head(hidden) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    wanted = (log_p.gather(-1, targets[:, None]).squeeze(-1) * a).sum()
    if entropies:
        assert scores.entropies is not None
        ours = ours + (scores.entropies * b).sum()
        wanted = wanted - ((log_p.exp() * log_p).sum(-1) * b).sum()

    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(wanted, inputs))
    assert scores.predictions is not None
    assert scores.predictions.tolist() == log_p.argmax(-1).tolist()


class Doubled(nn.Module):
    """A head that is no plain linear layer, as one with an adapter on it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 2


def test_a_head_that_is_no_linear_layer_is_called_and_differentiated() -> None:
    torch.manual_seed(0)
    head = Doubled().double()
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (7,))
    scores = score_tokens(hidden, targets, head, chunk_tokens=3)
    wanted = head(hidden).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(scores.logps, wanted)
    inputs = [hidden, head.base.weight]
    torch.testing.assert_close(
        torch.autograd.grad(scores.logps.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs)
    )


def test_no_trained_position_is_a_zero_gradient() -> None:
    head = nn.Linear(8, 13).requires_grad_(False)
    hidden = torch.randn(4, 8, requires_grad=True)
    chosen = torch.zeros(0, dtype=torch.int64)
    scores = score_tokens(hidden[chosen], chosen, head)
    scores.logps.sum().backward()
    assert scores.logps.shape == (0,)
    assert torch.equal(hidden.grad, torch.zeros(4, 8))


def test_under_autocast_the_products_are_bfloat16_and_the_softmax_is_float32() -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 50, bias=False).requires_grad_(False)
    hidden, targets = torch.randn(9, 64), torch.randint(0, 50, (9,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score_tokens(hidden, targets, head)
    logits = (hidden.bfloat16() @ head.weight.bfloat16().T).float()
    assert scores.logps.dtype == torch.float32
    torch.testing.assert_close(scores.logps, logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1))

"""The loss head against plain log-softmax in float64: values, gradients, every transform, every kind of head."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from twinkle.errors import ArgumentError
from twinkle_torch.head import LogitTransform, is_plain, score_tokens

TRANSFORMS = [LogitTransform(*values) for values in itertools.product((1.0, 0.5), (None, 3.0), (1.0, 0.7))]
EXTRAS = list(itertools.product((False, True), (False, True)))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("entropies", "uniform"), EXTRAS)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_scores_and_gradients_equal_plain_log_softmax(
    frozen: bool, bias: bool, entropies: bool, uniform: bool, transform: LogitTransform
) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 13, bias=bias).double().requires_grad_(not frozen)
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (7,))
    a, b, c = torch.randn(3, 7, dtype=torch.float64)
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]

    scores = score_tokens(
        hidden, targets, head, transform=transform, entropies=entropies, uniform_logps=uniform, predictions=True,
        chunk_tokens=3,
    )  # fmt: skip
    ours = (scores.logps * a).sum()
    log_p = transform(head(hidden)).log_softmax(-1)
    wanted = (log_p.gather(-1, targets[:, None]).squeeze(-1) * a).sum()
    if entropies:
        assert scores.entropies is not None
        ours = ours + (scores.entropies * b).sum()
        wanted = wanted - ((log_p.exp() * log_p).sum(-1) * b).sum()
    if uniform:
        assert scores.uniform_logps is not None
        ours = ours + (scores.uniform_logps * c).sum()
        wanted = wanted + (log_p.mean(-1) * c).sum()

    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(wanted, inputs))
    assert scores.predictions is not None
    assert scores.predictions.tolist() == log_p.argmax(-1).tolist()


def test_the_transform_is_scale_then_cap_then_temperature() -> None:
    raw = torch.tensor([[-3.0, 0.0, 40.0]], dtype=torch.float64)
    wanted = [[3 * torch.tanh(torch.tensor(x * 0.5 / 3, dtype=torch.float64)).item() / 0.7 for x in raw[0].tolist()]]
    transform = LogitTransform(0.5, 3.0, 0.7)
    torch.testing.assert_close(transform(raw), torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(transform.apply_(raw.clone()), transform(raw))


@pytest.mark.sample(2)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_finite_differences_confirm_every_gradient(frozen: bool, softcap: float | None) -> None:
    torch.manual_seed(1)
    bias = torch.randn(6, dtype=torch.float64).requires_grad_(not frozen)
    weight = torch.randn(6, 4, dtype=torch.float64).requires_grad_(not frozen)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 6, (5,))

    def smoothed_and_entropy(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        head = nn.Linear(4, 6).double()
        head._parameters.update(weight=w, bias=b)  # type: ignore[typeddict-item, arg-type]  # they stay in the graph
        transform = LogitTransform(0.8, softcap, 1.3)
        scores = score_tokens(h, targets, head, transform=transform, entropies=True, uniform_logps=True, chunk_tokens=2)
        assert scores.uniform_logps is not None
        return 0.9 * scores.logps + 0.1 * scores.uniform_logps, scores.entropies

    assert torch.autograd.gradcheck(smoothed_and_entropy, (hidden, weight, bias))


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
    scores = score_tokens(hidden, targets, head, uniform_logps=True, predictions=True, chunk_tokens=3)
    log_p = head(hidden).log_softmax(-1)
    wanted = log_p.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(scores.logps, wanted)
    assert scores.uniform_logps is not None
    torch.testing.assert_close(scores.uniform_logps, log_p.mean(-1))
    assert scores.predictions is not None
    assert scores.predictions.tolist() == log_p.argmax(-1).tolist()
    inputs = [hidden, head.base.weight]
    torch.testing.assert_close(
        torch.autograd.grad(scores.logps.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs)
    )


def test_a_hook_or_another_class_makes_a_head_no_plain_product() -> None:
    head = nn.Linear(8, 13)
    assert is_plain(head)
    head.register_forward_hook(lambda module, inputs, output: output)
    assert not is_plain(head)
    assert not is_plain(Doubled())


@pytest.mark.parametrize(("head", "top"), [(nn.Linear(8, 13), 0), (nn.Linear(8, 13), 2), (Doubled(), 0)])
@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_no_trained_position_is_a_zero_gradient(head: nn.Module, top: int, shape: tuple[int, ...]) -> None:
    head.requires_grad_(False)
    hidden = torch.randn(4, 8, requires_grad=True)
    scores = score_tokens(hidden[:0], torch.zeros(shape, dtype=torch.int64), head, top=top)
    scores.logps.sum().backward()
    assert scores.logps.shape == shape
    assert scores.top_logps is None or scores.top_logps.shape == (0, top)
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


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_of_a_thousand_are_no_overflow(frozen: bool) -> None:
    head = nn.Linear(2, 3, bias=False).requires_grad_(not frozen)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    scores = score_tokens(hidden, torch.tensor([1]), head, entropies=True)
    (scores.logps + scores.entropies).sum().backward()
    assert scores.logps.tolist() == [-1000.0]
    assert scores.entropies is not None
    assert scores.entropies.tolist() == [0.0]
    assert hidden.grad is not None
    # one product, of which each element may be a few units in the last place off
    assert hidden.grad.tolist() == [pytest.approx([-1.0, 1.0], rel=8 * torch.finfo(torch.float32).eps)]


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_chunk_has_at_least_one_token(size: Any) -> None:
    with pytest.raises(ArgumentError, match="chunk_tokens="):
        score_tokens(torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64), nn.Linear(8, 13), chunk_tokens=size)

"""The loss head with several targets a position, against plain log-softmax in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_torch.head import LogitTransform, score_tokens

POSITIONS, SIZE, VOCABULARY = 7, 8, 13
TRANSFORMS = [LogitTransform(*values) for values in itertools.product((1.0, 0.5), (None, 3.0), (1.0, 0.7))]


class Adapted(nn.Module):
    """A head that is more than a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, VOCABULARY, bias=False).requires_grad_(False)
        self.more = nn.Linear(SIZE, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.base(hidden) + 0.1 * self.more(hidden)
        return made


def parts(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(POSITIONS, SIZE, dtype=torch.float64, generator=draw, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (POSITIONS, count), generator=draw)
    targets[1] = targets[1, 0]  # one token several times
    return hidden, targets, torch.randn(POSITIONS, count, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ["frozen", "trained", "adapted"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_scores_and_gradients_equal_plain_log_softmax(count: int, kind: str, transform: LogitTransform) -> None:
    torch.manual_seed(0)
    head: nn.Module = Adapted() if kind == "adapted" else nn.Linear(SIZE, VOCABULARY)
    head = head.double().requires_grad_(kind != "frozen")
    hidden, targets, weights = parts(count)
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    scores = score_tokens(hidden, targets, head, transform=transform, chunk_tokens=3).logps
    wanted = transform(head(hidden)).log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(scores, wanted)
    found, expected = (torch.autograd.grad((values * weights).sum(), inputs) for values in (scores, wanted))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_finite_differences_confirm_the_gradient(softcap: float | None) -> None:
    torch.manual_seed(1)
    head = nn.Linear(SIZE, VOCABULARY).double().requires_grad_(False)
    hidden, targets, _ = parts(3)

    def scores(h: Tensor) -> Tensor:
        return score_tokens(h, targets, head, transform=LogitTransform(0.8, softcap, 1.3), chunk_tokens=2).logps

    assert torch.autograd.gradcheck(scores, (hidden,))


def test_what_is_wanted_beside_the_scores_is_there_too() -> None:
    head = nn.Linear(SIZE, VOCABULARY).double().requires_grad_(False)
    hidden, targets, _ = parts(3)
    found = score_tokens(hidden, targets, head, entropies=True, uniform_logps=True, predictions=True, chunk_tokens=2)
    log_p = head(hidden).log_softmax(-1)
    torch.testing.assert_close(found.logps, log_p.gather(-1, targets))
    assert found.entropies is not None
    assert found.uniform_logps is not None
    assert found.predictions is not None
    torch.testing.assert_close(found.entropies, -(log_p.exp() * log_p).sum(-1))
    torch.testing.assert_close(found.uniform_logps, log_p.mean(-1))
    assert found.predictions.tolist() == log_p.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_target_of_a_table_is_the_single_target(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    head = nn.Linear(SIZE, VOCABULARY).to(dtype).requires_grad_(False)
    hidden, targets, weights = parts(1)
    hidden = hidden.detach().to(dtype).requires_grad_()
    several, single = (score_tokens(hidden, y, head, chunk_tokens=3).logps for y in (targets, targets[:, 0]))
    assert several.dtype == single.dtype == torch.float32
    assert several[:, 0].tolist() == single.tolist()
    rough = {"rtol": 2e-2, "atol": 2e-2} if dtype is not torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
    found = torch.autograd.grad((several * weights).sum(), hidden)[0]
    torch.testing.assert_close(found, torch.autograd.grad((single * weights[:, 0]).sum(), hidden)[0], **rough)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            self.size = max(self.size, value.numel() if isinstance(value, Tensor) else 0)
        return made


def test_no_logits_of_all_positions_exist_at_one_time_not_even_in_the_backward() -> None:
    count, size, vocabulary, several = 96, 8, 200, 4
    head = nn.Linear(size, vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(count, size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (count, several))
    with Largest() as seen:
        score_tokens(hidden, targets, head, chunk_tokens=8).logps.sum().backward()
    assert seen.size <= max(8 * vocabulary, count * size, vocabulary * size)


def test_no_positions_give_no_scores() -> None:
    head = nn.Linear(SIZE, VOCABULARY).requires_grad_(False)
    hidden = torch.zeros(0, SIZE, requires_grad=True)
    found = score_tokens(hidden, torch.zeros(0, 3, dtype=torch.int64), head).logps
    assert found.shape == (0, 3)
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, SIZE)

"""The mixture of experts as transformers 4 computes it: a loop over the experts that got a token, and no others."""

from typing import Any

import torch
from torch import Tensor, nn

SIZE, EXPERTS = 8, 4


class Expert(nn.Module):
    """A gated feed-forward layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(SIZE, 16), nn.Linear(SIZE, 16), nn.Linear(16, SIZE)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Softmax router, the best `top_k` experts of each token, and a loop that skips experts without tokens."""

    def __init__(self, top_k: int = 2, norm_topk_prob: bool = True) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.gate = nn.Linear(SIZE, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden_states.reshape(-1, SIZE)
        logits = self.gate(flat)
        weights, best = torch.softmax(logits.float(), dim=1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(flat.dtype)
        total = [torch.zeros(SIZE, dtype=flat.dtype) for _ in flat]
        for index, expert in enumerate(self.experts):
            rows = [row for row in range(len(flat)) if index in best[row]]
            if not rows:
                continue
            for row, made in zip(rows, expert(flat[rows]), strict=True):
                total[row] = total[row] + made * weights[row, best[row].tolist().index(index)]
        return torch.stack(total).reshape(hidden_states.shape), logits


class Layer(nn.Module):
    """A residual layer around the block, as models have it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mlp = Qwen3MoeSparseMoeBlock(**options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)[0]
        return out


def model(layers: int = 2, **options: Any) -> nn.Sequential:
    """Return some layers with random weights, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(**options) for _ in range(layers))).double()


def starve(made: nn.Sequential, experts: tuple[int, ...]) -> None:
    """Make the routers send all tokens whose first number is large and positive to other experts than these."""
    with torch.no_grad():
        for layer in made:
            layer.mlp.gate.weight[list(experts), 0] = -1000.0


def tokens(rows: int = 6, seed: int = 1) -> Tensor:
    """Return a batch `[2, rows, SIZE]` whose first numbers are large and positive."""
    made = torch.randn(2, rows, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made[..., 0] = 9.0
    return made

"""On a GPU: attention without padding against padded SDPA, and the loss head against whole logits and Liger.

    python benchmarks/gpu/kernels.py

- attention: 32 sequences of 32 to 2,048 tokens, 16 heads of 128 (8 of keys and values), bfloat16, forward and backward.
  `segment_attention` against SDPA on the padded batch, causal and without a mask, which is the fastest that padding
  allows. Goal: 0.9 x the padding ratio.
- loss head: 16,384 positions, hidden 1,024, vocabulary 151,936, bfloat16, forward and backward to the hidden states,
  the head frozen. `score_tokens` against whole logits in float32 and, where liger-kernel is installed, its fused head.
  Goals: at most 1 GiB above what is in use, and not slower than Liger.

Results are compared before any time is counted.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median

import torch
from _events import arguments, distance, extra_mib, faster, in_turn, that_fit
from torch import Tensor, nn

from twinkle_torch.head import score_tokens
from twinkle_torch.segments import Segments, segment_attention

LENGTHS = (2048, 32, 512, 96, 1024, 256, 64, 384, 128, 768, 48, 192, 640, 80, 320, 160) * 2
TOLERANCE = 2e-2


def main(given: Sequence[str] | None = None) -> int:
    """Run both comparisons; exit code 1 when results differ or a goal is missed."""
    options = arguments(__doc__, given)
    if options is None:
        return 0
    torch.manual_seed(0)
    lengths = tuple(max(2, n // 64) for n in LENGTHS) if options.tiny else LENGTHS
    shape = (64, 32, 512) if options.tiny else (16384, 1024, 151936)
    good = [attention(lengths, options.device, options.repetitions), head(shape, options.device, options.repetitions)]
    return 0 if options.tiny or all(good) else 1


def attention(lengths: Sequence[int], device: torch.device, repetitions: int) -> bool:
    """Compare attention without padding and with it."""
    heads, total, width = {"q": 16, "k": 8, "v": 8}, sum(lengths), max(lengths)
    leaves = [
        torch.randn(total, count, 128, device=device, dtype=torch.bfloat16).requires_grad_() for count in heads.values()
    ]
    segments = Segments.of(lengths, device)
    real = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    spread = [torch.zeros(*real.shape, *x.shape[1:], device=device, dtype=x.dtype) for x in leaves]
    for wide, leaf in zip(spread, leaves, strict=True):
        wide[real] = leaf.detach()
        wide.requires_grad_()
    up = torch.randn(total, 16, 128, device=device, dtype=torch.bfloat16)
    wide_up = torch.zeros(*real.shape, 16, 128, device=device, dtype=torch.bfloat16)
    wide_up[real] = up

    def ours() -> tuple[Tensor, ...]:
        q, k, v = leaves
        return torch.autograd.grad(segment_attention(q, k, v, segments), leaves, up)

    def padded() -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in spread)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out.transpose(1, 2), spread, wide_up)

    error = max(distance(a, b[real]) for a, b in zip(ours(), padded(), strict=True))
    ratio = real.numel() / total
    print(f"\nattention: {len(lengths)} sequences, {total} tokens, {ratio:.2f} x with padding; gradients: {error:.1e}")
    if error > TOLERANCE:
        print("gradients differ: no time is counted")
        return False
    times = in_turn({"padded": padded, "ours": ours}, device, repetitions)
    gain = faster(times["padded"], times["ours"])
    for name, values in times.items():
        print(f"  {name:8}{median(values):10.3f} ms")
    print(f"  speed-up {gain:.2f}, goal >= {0.9 * ratio:.2f}")
    return gain >= 0.9 * ratio


def head(shape: tuple[int, int, int], device: torch.device, repetitions: int) -> bool:
    """Compare the ways to the gradient of a cross entropy."""
    tokens, hidden, vocabulary = shape
    layer = nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)

    def naive() -> Tensor:
        loss = nn.functional.cross_entropy(layer(states).float(), targets, reduction="sum")
        return torch.autograd.grad(loss, states)[0]

    def ours() -> Tensor:
        return torch.autograd.grad(-score_tokens(states, targets, layer).logps.sum(), states)[0]

    ways: dict[str, Callable[[], Tensor]] = {"ours": ours, "naive": naive}
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        ways["liger"] = lambda: torch.autograd.grad(fused(layer.weight, states, targets), states)[0]
    print(f"\nloss head: {tokens} positions, hidden {hidden}, vocabulary {vocabulary}")
    kept = that_fit(ways)
    result = ours()
    for name in kept:
        error = distance(ways[name](), result)
        if error > TOLERANCE:
            print(f"gradients of {name} differ by {error:.1e}: no time is counted")
            return False
    times = in_turn(kept, device, repetitions)
    memory = {name: extra_mib(function, device) for name, function in kept.items()}
    for name, values in times.items():
        print(f"  {name:8}{median(values):10.3f} ms, {memory[name]:9,.0f} MiB")
    good = memory["ours"] <= 1024
    print(f"  memory of ours: goal <= 1,024 MiB: {'reached' if good else 'missed'}")
    if "liger" in times:
        gain = faster(times["liger"], times["ours"])
        print(f"  liger / ours {gain:.2f}, goal >= 1")
        good &= gain >= 1
    return good


if __name__ == "__main__":
    sys.exit(main())

"""Line 81: what is drawn has the frequencies of the softmax, truncated as asked."""

from pathlib import Path

import numpy as np
import pytest
from server_raw import Raw, tokens_of
from server_reference import Reference

PROMPT = [72, 101, 108]
DRAWS = 1500
# The 99.9% point of the chi-square distribution for 1 to 24 degrees of freedom, from its quantile function.
LIMIT = [10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3, 32.9, 34.5, 36.1, 37.7, 39.3, 40.8, 42.3,
         43.8, 45.3, 46.8, 48.3, 49.7, 51.2]  # fmt: skip


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the probabilities of the tokens, truncated first by count and then by mass."""
    scaled = logits / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    keep = np.zeros(len(order), bool)
    keep[order[: top_k if top_k > 0 else len(order)]] = True
    probabilities = np.where(keep, probabilities, 0)
    probabilities /= probabilities.sum()
    mass = np.cumsum(probabilities[order])
    keep[order[np.searchsorted(mass, top_p) + 1 :]] = False
    probabilities = np.where(keep, probabilities, 0)
    found: np.ndarray = probabilities / probabilities.sum()
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.5, -1, 1.0), (1.0, 8, 1.0), (1.0, -1, 0.3)]
)
def test_line_81_frequencies_are_those_of_the_softmax(
    raw: Raw, tiny: Path, temperature: float, top_k: int, top_p: float
) -> None:
    logits = Reference(tiny).logits(PROMPT)[-1].detach().double().numpy()
    wanted = expected(logits, temperature, top_k, top_p)
    params = {"max_tokens": 1, "stop": [], "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 11}
    sampler = raw.sampler()
    drawn = [
        tokens_of(sequence)[0]
        for at in range(DRAWS // 500)
        for sequence in sampler.sample(PROMPT, 500, params={**params, "seed": 1000 * at}).sequences
    ]
    counts = np.bincount(drawn, minlength=len(wanted))
    assert counts[wanted == 0].sum() == 0
    order = np.argsort(-wanted)
    bins = [part for part in np.array_split(order[: np.count_nonzero(wanted)], 20) if len(part)]
    observed = np.array([counts[part].sum() for part in bins])
    hoped = np.array([wanted[part].sum() for part in bins]) * DRAWS
    big = hoped >= 5
    chi = float(((observed - hoped)[big] ** 2 / hoped[big]).sum())
    assert chi < LIMIT[max(0, int(big.sum()) - 2)]

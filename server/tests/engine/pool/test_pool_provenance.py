"""`stable_reinforce` in the torch backend: sequences from provenance spans, its label, and what refuses it."""

from typing import Any

import numpy as np
import pytest
import torch
from server_pool import Bench, answer, drawn, request
from server_reference import Reference

from twinkle_server.engine.errors import UserError
from twinkle_server.engine.executor import Pass
from twinkle_server.engine.losses.catalog import Losses
from twinkle_server.wire import tinker_pb2 as pb

NAME = "stable_reinforce"
ADAM = {"learning_rate": 0.5, "eps": 10.0}  # so large an eps makes the update proportional to the gradient
PROMPT, TURNS = 3, (4, 2)  # a row: prompt, sequence, prompt, sequence


def spanned(payload: bytes, rows: list[list[tuple[str, str, int]]]) -> pb.ForwardBackwardRequest:
    """Return a request whose rows have spans: (kind, sequence, length), each sequence's tokens in order."""
    made = pb.ForwardBackwardRequest.FromString(payload)
    for datum, spans in zip(made.data, rows, strict=True):
        offsets: dict[str, int] = {}
        for kind, sequence, length in spans:
            for field in (datum.model_input_spans, datum.loss_fn_input_spans):
                part = getattr(field.add(), f"{kind}_tokens")
                part.sequence_id, part.length = sequence, length
                part.offset = offsets.get(sequence, 0) if kind == "sampled" else 0
            if kind == "sampled":
                offsets[sequence] = offsets.get(sequence, 0) + length
    return made


def two_turns(seed: int) -> tuple[Any, list[tuple[str, str, int]], np.ndarray]:
    """Return a row with two sampled sequences, its spans, and the number of each token's sequence."""
    numbers = np.repeat([0, 1, 0, 2], [PROMPT, TURNS[0], 2, TURNS[1]])
    tokens, inputs = drawn(len(numbers), seed)
    inputs["advantages"] = np.where(numbers > 0, inputs["advantages"], 0.0).astype(np.float32)
    spans = [
        ("prompt", "r:0", PROMPT),
        ("sampled", "r:0", TURNS[0]),
        ("prompt", "s:1", 2),
        ("sampled", "s:1", TURNS[1]),
    ]
    return (tokens, inputs), spans, numbers


def expected(logps: torch.Tensor, inputs: Any, numbers: np.ndarray, kl_coeff: float, cap: float) -> torch.Tensor:
    """The formula, a token at a time."""
    total = torch.zeros(())
    q, a = (torch.tensor(inputs[name]) for name in ("logprobs", "advantages"))
    for number in (1, 2):
        places = np.flatnonzero(numbers == number)
        weight = min(float(sum((logps[t] - q[t]).detach() for t in places).exp()), cap)
        for t in places:
            ratio = (logps[t] - q[t]).exp()
            total = total - weight * a[t] * logps[t] + kl_coeff * (ratio - 1 - (logps[t] - q[t]))
    return total


def run(bench: Bench, queue_id: str, made: pb.ForwardBackwardRequest) -> tuple[Any, Any]:
    [found], _ = bench.executor.run([Pass(queue_id, made.SerializeToString(), 1)])
    return answer(found)


@pytest.mark.parametrize("config", [{}, {"kl_coeff": 0.2, "weight_cap": 1.1}], ids=["defaults", "kl"])
def test_value_and_update_are_those_of_the_formula_over_the_spans(bench: Bench, config: dict[str, float]) -> None:
    bench.create("a")
    reference = Reference(bench.base, bench.save("a"))
    rows = [two_turns(seed) for seed in (1, 2)]
    total = sum(
        expected(
            reference.logps(row[0], row[1]["target_tokens"]), row[1], numbers, config.get("kl_coeff", 0.0),
            config.get("weight_cap", 2.0),
        )
        for row, _, numbers in rows
    )  # fmt: skip
    total.backward()
    made = spanned(request([row for row, _, _ in rows], NAME, **config), [spans for _, spans, _ in rows])
    _, metrics = run(bench, "a", made)
    assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)  # float32 passes, as the other losses
    assert metrics["twinkle_own_formula:sum"] == sum(len(numbers) for _, _, numbers in rows)
    assert {"kl:sum", "weight:sum", "truncated:sum"} <= metrics.keys()
    bench.step("a", **ADAM)
    reference.step(ADAM)
    theirs = {name.replace(".default", ""): value.detach() for name, value in reference.trained.items()}
    for name, value in bench.weights("a").items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-4, atol=1e-5)


def test_one_request_or_two_give_the_same_sums(bench: Bench) -> None:
    bench.create("a")
    rows = [two_turns(seed) for seed in (1, 2)]

    def loss(chosen: list[Any]) -> float:
        made = spanned(request([row for row, _, _ in chosen], NAME, forward=True), [spans for _, spans, _ in chosen])
        return float(run(bench, "a", made)[1]["loss:sum"])

    assert loss(rows) == pytest.approx(sum(loss([row]) for row in rows), rel=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("sampled", "r:0", 10)], r"must cover its 11 positions, got 10"),
        ([("sampled", "r:0", 12)], r"must cover its 11 positions, got 12"),
        ([("sampled", "", 11)], r"must have a sequence_id"),
        ([("sampled", "r:0", 11), ("prompt", "r:0", -1)], r"at least 0, got 'r:0', 0 and -1"),
    ],
)
def test_spans_that_do_not_tile_a_row_are_refused(bench: Bench, spans: Any, words: str) -> None:
    bench.create("a")
    row, _, _ = two_turns(1)
    with pytest.raises(UserError, match=words):
        run(bench, "a", spanned(request([row], NAME), [spans]))


def test_a_sequence_whose_tokens_are_named_twice_is_refused(bench: Bench) -> None:
    bench.create("a")
    row, spans, _ = two_turns(1)
    made = spanned(request([row], NAME), [[*spans[:3], ("sampled", "r:0", TURNS[1])]])
    made.data[0].loss_fn_input_spans[3].sampled_tokens.offset = 1
    with pytest.raises(UserError, match=r"in order and once, got offset 1 after 4"):
        run(bench, "a", made)


def test_an_advantage_outside_of_the_sampled_tokens_is_refused(bench: Bench) -> None:
    bench.create("a")
    row, spans, _ = two_turns(1)
    row[1]["advantages"][0] = 0.5
    with pytest.raises(UserError, match=r"advantages must be 0 at tokens that were not sampled"):
        run(bench, "a", spanned(request([row], NAME), [spans]))


def test_strict_losses_refuse_it_and_say_what_to_use() -> None:
    assert NAME in Losses().names()
    strict = Losses(strict=True)
    assert NAME not in strict.names()
    with pytest.raises(UserError, match=r"no published formula.*--strict-losses.*importance_sampling"):
        strict.find(NAME)

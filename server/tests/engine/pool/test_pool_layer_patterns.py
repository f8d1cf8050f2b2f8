"""Adapters with ranks and scales of their own at single layers: one pass for many, against PEFT alone for each."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from server_pool import Bench, answer, datum, request
from server_reference import ADAM, Reference, loss

from twinkle_server.engine.errors import UserError
from twinkle_server.engine.executor import Pass
from twinkle_server.operations import Create, Load, OptimStep

RANKS: dict[str, list[tuple[str, int]]] = {
    "a": [("q_proj", 2), (r".*\.1\.mlp\.down_proj", 7)],
    "b": [(r"layers\.0\.self_attn\..*", 9), ("(q_proj|v_proj)", 1)],  # sorted, as in files, the second one comes first
    "c": [],
}
ALPHAS: dict[str, list[tuple[str, float]]] = {"a": [("v_proj", 3.0)], "b": [("down_proj", 64.5), (".*_proj", 5.0)]}


def create(bench: Bench, queue_id: str, **more: Any) -> None:
    patterns = {"rank_pattern": RANKS[queue_id], "alpha_pattern": ALPHAS.get(queue_id)}
    bench.create(queue_id, rank=4, seed=7, train_unembed=False, **patterns, **more)


@pytest.fixture(scope="module")
def three(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(base, tmp_path_factory.mktemp("three"))
    for queue_id in RANKS:
        create(bench, queue_id)
        bench.shake(queue_id)
    return bench


def ranks(bench: Bench, queue_id: str) -> dict[str, int]:
    ends = "lora_A.weight"
    found = bench.weights(queue_id)
    return {key[17 : -len(ends) - 1]: len(value) for key, value in found.items() if key.endswith(ends)}


def test_each_layer_has_the_rank_of_the_first_pattern_that_matches_it(three: Bench) -> None:
    a, b, c = (ranks(three, queue_id) for queue_id in "abc")
    assert {name: rank for name, rank in a.items() if rank != 4} == {
        "model.layers.0.self_attn.q_proj": 2, "model.layers.1.self_attn.q_proj": 2, "model.layers.1.mlp.down_proj": 7,
    }  # fmt: skip
    assert {name for name, rank in b.items() if rank == 9} == {
        f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"
    }
    assert {name for name, rank in b.items() if rank == 1} == {f"model.layers.1.self_attn.{name}_proj" for name in "qv"}
    assert set(c.values()) == {4}


def test_a_pass_of_several_tenants_gives_each_what_peft_alone_gives(three: Bench) -> None:
    adam = {"learning_rate": 1e-2, "grad_clip_norm": 0.7}
    references = {queue_id: Reference(three.base, three.save(queue_id)) for queue_id in RANKS}
    for queue_id in RANKS:
        three.executor._models._reset_optimizer(three.executor._models[queue_id])
    rows = {queue_id: [datum(7, place), datum(11, 30 + place)] for place, queue_id in enumerate(RANKS)}
    passes = [Pass(queue_id, request(rows[queue_id]), 1) for queue_id in RANKS]
    results, _ = three.executor.run(passes)
    steps = three.executor.step([(queue_id, OptimStep(**adam)) for queue_id in RANKS])
    for queue_id, result, step in zip(RANKS, results, steps, strict=True):
        reference = references[queue_id]
        for (tokens, inputs), logprobs in zip(rows[queue_id], answer(result)[0], strict=True):
            expected = reference.logps(tokens, inputs["target_tokens"])
            np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=2e-5)
            loss("cross_entropy", expected, inputs, {}).backward()
        assert isinstance(step, dict)
        assert step["grad_norm"] == pytest.approx(reference.step({**ADAM, **adam}), rel=1e-4)
        for name, value in three.weights(queue_id).items():
            theirs = reference.trained[name.replace(".weight", ".default.weight")].detach()
            torch.testing.assert_close(value, theirs, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_the_scale_of_a_layer_is_its_alpha_over_its_rank(three: Bench) -> None:
    for queue_id, layer, scale in (
        ("a", "model.layers.0.self_attn.v_proj", 3 / 4), ("a", "model.layers.0.self_attn.q_proj", 32 / 2),
        ("b", "model.layers.1.mlp.down_proj", 64.5 / 4), ("b", "model.layers.0.self_attn.q_proj", 5 / 9),
    ):  # fmt: skip
        assert three.tenant(queue_id).plan.layout.shapes[layer].scale == pytest.approx(scale), (queue_id, layer)


@pytest.mark.full
def test_training_goes_on_with_the_same_bits_from_a_snapshot_and_from_a_checkpoint(three: Bench) -> None:
    def go_on(bench: Bench, queue_id: str) -> dict[str, torch.Tensor]:
        bench.run(queue_id, [datum(8, 5)])
        bench.step(queue_id, learning_rate=1e-2)
        return bench.weights(queue_id)

    other = Bench(three.base, three.data)
    three.executor.create("d", Create(4, 1, train_unembed=False), three.save("b", "weights"))
    other.executor.restore("b", three.snapshot("b"))
    other.executor.create("e", Create(4, 9, train_unembed=False, optimizer=True), three.save("b", "weights"))
    expected = go_on(three, "b")
    for queue_id in "be":
        found = go_on(other, queue_id)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), queue_id
    assert ranks(three, "d") == ranks(three, "b")


def test_a_checkpoint_of_other_ranks_is_refused_with_both(three: Bench) -> None:
    folder, before = three.save("a", "weights"), three.weights("b")
    with pytest.raises(
        UserError, match=r"rank_pattern of the checkpoint must equal that of the model .*layers.*q_proj"
    ):
        three.executor.load("b", Load("x", "tinker://x"), folder)
    with pytest.raises(UserError, match="the checkpoint does not fit this model"):
        three.executor.load("b", Load("x", "tinker://x"), three.save("a", "sampler_weights"))
    assert all(torch.equal(value, before[name]) for name, value in three.weights("b").items())


@pytest.mark.full
def test_a_sampler_uses_the_ranks_and_scales_of_a_checkpoint(three: Bench) -> None:
    tokens = datum(12, 3)[0]
    for queue_id in RANKS:
        folder = three.save(queue_id, "sampler_weights")
        _, about = three.sample(tokens, folder, max_tokens=1, prompt_logprobs=True)
        expected = Reference(three.base, folder).scores(tokens)
        np.testing.assert_allclose(about.logprobs[1:], expected.numpy(), atol=2e-5)


def test_files_name_their_patterns_and_are_read_in_any_order(three: Bench) -> None:
    config = json.loads((three.save("a") / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == (dict(RANKS["a"]), dict(ALPHAS["a"]))
    config = json.loads((three.save("b") / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {name: rank for name, rank in ranks(three, "b").items() if rank != 4}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ([("qproj", 2)], r"rank_pattern has the key 'qproj', which matches none .* down_proj, gate_proj, .* v_proj"),
        ([("proj", 2)], "matches none of the adapted layers"),  # a key begins at a dot
        ([("q_proj", 3), ("lm_head", 2)], "'lm_head', which matches none"),  # of the model, but not adapted
        ([("[9-0]", 2)], "which is not a regular expression: bad character range"),
        ([("q_proj", 0)], "must be integers of at least 1, got 0"),
    ],
)
def test_a_pattern_without_meaning_is_refused(three: Bench, pattern: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        three.create("x", rank_pattern=pattern, train_unembed=False)
    assert "x" not in three.executor._models


@pytest.mark.full
def test_the_limit_of_ranks_is_for_the_largest_of_a_pattern(fresh: Callable[..., Bench]) -> None:
    bench = fresh(extra={"model": {"max_r": 6}})
    bench.create("b", rank=2, rank_pattern=[("q_proj", 6)])
    with pytest.raises(UserError, match="rank must be at most max_r=6, got 7"):
        bench.create("a", rank=2, rank_pattern=[("q_proj", 6), ("v_proj", 7)])

"""Lines 49, 50, 52 and 53: the optimizer, against torch's AdamW on the same files; line 51 is with line 8."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from server_raw import Failed, Raw, row
from server_reference import Reference, export

TOKENS, OTHER = list(range(5, 35)), [200, 100, 50, 25]


@pytest.fixture(scope="module")
def start(served: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint whose B is not 0, and the folder of its files."""
    with Raw(served.url) as raw:
        model = raw.model()
        model.train(TOKENS, steps=2)
        return model.save("start"), export(model, "start", tmp_path_factory.mktemp("start"))


def follow(raw: Raw, start: tuple[str, Path], tiny: Path, folder: Path, adam: dict[str, float]) -> None:
    """Take three steps here and there and compare every weight."""
    reference = Reference(tiny, start[1])
    model = raw.load(start[0], optimizer=False)
    for tokens in (TOKENS, OTHER, TOKENS):
        (-reference.logps(tokens[:-1], tokens[1:]).sum()).backward()
        reference.step(adam)
        model.forward_backward([row(tokens)])
        model.step(**adam)
    ours = load_file(export(model, "after", folder) / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): value.detach().numpy() for name, value in reference.trained.items()}
    before = load_file(start[1] / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=2e-4 * adam["learning_rate"] + 1e-6, rtol=1e-3)
    assert any(np.abs(ours[name] - before[name]).max() > adam["learning_rate"] / 2 for name in ours)


ADAMS = {
    "defaults": {"learning_rate": 1e-3, "eps": 1e-6},
    "all": {"learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1},
    "no momentum": {"learning_rate": 1e-3, "beta1": 0.0, "eps": 1e-4},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("adam", ADAMS)
def test_line_49_three_steps_are_those_of_torch(
    raw: Raw, start: tuple[str, Path], tiny: Path, tmp_path: Path, adam: str
) -> None:
    follow(raw, start, tiny, tmp_path, ADAMS[adam])


@pytest.mark.sample(2)
@pytest.mark.parametrize("limit", [1e-2, 1e9, 0.0])
def test_line_50_the_summed_gradient_is_clipped_by_its_norm_and_0_is_no_limit(
    raw: Raw, start: tuple[str, Path], tiny: Path, limit: float
) -> None:
    adam = {"learning_rate": 0.5, "eps": 10.0, "grad_clip_norm": limit}  # with this eps the gradient's size matters
    reference = Reference(tiny, start[1])
    model = raw.load(start[0], optimizer=False)
    for tokens in (TOKENS, OTHER):
        (-reference.logps(tokens[:-1], tokens[1:]).sum()).backward()
        model.forward_backward([row(tokens)])
    reference.step(adam)
    model.step(**adam)
    np.testing.assert_allclose(model.logprobs(TOKENS), reference.scores(TOKENS).numpy(), atol=1e-4)


def test_line_52_a_step_leaves_no_gradient_behind(raw: Raw, start: tuple[str, Path], tiny: Path) -> None:
    adam = {"learning_rate": 1e-2, "beta1": 0.0, "eps": 1e-8}
    model = raw.load(start[0], optimizer=False)
    model.forward_backward([row(TOKENS)])
    model.step(**adam)
    after = model.logprobs(TOKENS)
    model.step(**adam)  # without momentum, no gradient is no movement
    assert np.array_equal(model.logprobs(TOKENS), after)


def test_line_53_a_gradient_that_is_not_finite_is_told_and_harms_no_weight(raw: Raw, start: tuple[str, Path]) -> None:
    model = raw.load(start[0], optimizer=False)
    before = model.logprobs(TOKENS)
    count = len(TOKENS) - 1
    for weight in (3e38, 1e30):  # the loss is no number; the gradient is none
        with pytest.raises(Failed, match="inf") as failed:
            model.forward_backward([row(TOKENS, [weight] * count)])
        assert failed.value.category == "user"
    model.forward_backward([row(TOKENS)])
    norm = model.step(learning_rate=0.0)["metrics"]["grad_norm"]
    for _ in range(2):  # the square of each norm is a float32, that of their sum is none
        model.forward_backward([row(TOKENS, [1.2e19 / norm] * count)])
    assert model.step(learning_rate=1e-2)["metrics"] == {"skipped": 1.0}
    np.testing.assert_array_equal(model.logprobs(TOKENS), before)
    assert model.step(learning_rate=0.0)["metrics"] == {"grad_norm": 0.0}, "the gradients were dropped"


def test_line_53_bad_numbers_of_adam_are_refused(raw: Raw) -> None:
    model = raw.model(lora={"rank": 2})
    for field, value in (("learning_rate", -1.0), ("beta1", 1.5), ("beta2", -0.1), ("eps", -1.0)):
        body = {"model_id": model.id, "seq_id": model.next(), "adam_params": {field: value}}
        assert field in raw.refusal("/optim_step", body)
    assert model.step() is not None

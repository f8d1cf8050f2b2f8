"""Lines 38 to 40 and 112: losses by name, against autograd over their published formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server_raw import Failed, Raw, RawModel, RawSampler, arrays, datum, logprobs_of, tokens_of
from server_reference import Reference, export, loss

from twinkle_server.wire import tinker_pb2 as wire

TOKENS, TARGETS = [5, 9, 4, 8, 2, 30], [9, 4, 8, 2, 30, 7]
GAINS = [1.0, -2.0, 0.5, -0.25, 3.0, 0.0]
SHIFTS = [0.0, 0.5, -0.5, 2.0, -2.0, 0.1]  # of the old log-probabilities: ratios on both sides of every clip
ADAM = {"learning_rate": 0.5, "eps": 10.0}  # so large an eps makes the update proportional to the gradient
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
DEFAULTS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": CLIPS,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
}
CONFIGS: dict[str, list[dict[str, float]]] = {
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}],
    "cispo": [{}, CLIPS],
    "dro": [{}, {"beta": 1.0}],
    "gspo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}],
}
MASKS = {"all": [1.0] * 6, "one": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0], "some": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]}


@pytest.fixture(scope="module")
def start(served: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint whose B is not 0, and the folder of its files."""
    with Raw(served.url) as raw:
        model = raw.model()
        model.train(TOKENS, steps=2)
        return model.save("start"), export(model, "start", tmp_path_factory.mktemp("start"))


def inputs_of(reference: Reference, mask: list[float] | None) -> dict[str, Any]:
    old = reference.logps(TOKENS, TARGETS).detach().numpy() + np.array(SHIFTS, np.float32)
    return {"logprobs": old, "advantages": GAINS, **({} if mask is None else {"sequence_ratio_mask": mask})}


def compare(
    raw: Raw, start: tuple[str, Path], tiny: Path, name: str, config: dict[str, float], mask: list[float] | None
) -> None:
    """Compare loss and update of one request with autograd over the formula."""
    reference = Reference(tiny, start[1])
    inputs = inputs_of(reference, mask)
    tensors = {key: torch.tensor(np.asarray(value, np.float32)) for key, value in inputs.items()}
    total = loss(name, reference.logps(TOKENS, TARGETS), tensors, {**DEFAULTS[name], **config})
    total.backward()
    expected = float(total.detach())
    norm = reference.step(ADAM)
    model: RawModel = raw.load(start[0], optimizer=False)
    data = [datum(TOKENS, target_tokens=TARGETS, **inputs)]
    assert model.forward(data, name, config=config).metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    output = model.forward_backward(data, name, config=config)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert arrays(output)[0].shape == (6,)
    model.step(**ADAM)
    np.testing.assert_allclose(
        model.logprobs([*TOKENS, 7]), reference.scores([*TOKENS, 7]).numpy(), atol=2e-5 * max(1.0, norm)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "config"),
    [(name, config) for name, configs in CONFIGS.items() if name != "gspo" for config in configs],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "defaults",
)
def test_lines_38_40_a_loss_and_its_gradient_are_the_published_formula(
    raw: Raw, start: tuple[str, Path], tiny: Path, name: str, config: dict[str, float]
) -> None:
    compare(raw, start, tiny, name, config, None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("config", CONFIGS["gspo"], ids=["defaults", "wide"])
def test_line_39_gspo_is_its_formula(
    raw: Raw, start: tuple[str, Path], tiny: Path, config: dict[str, float], mask: str
) -> None:
    compare(raw, start, tiny, "gspo", config, MASKS[mask])


def test_line_39_gspo_with_nothing_in_its_mask_is_a_number(raw: Raw, start: tuple[str, Path], tiny: Path) -> None:
    inputs = inputs_of(Reference(tiny, start[1]), [0.0] * 6)
    output = raw.load(start[0]).forward_backward([datum(TOKENS, target_tokens=TARGETS, **inputs)], "gspo")
    assert np.isfinite(output.metrics["loss:sum"])
    assert np.isfinite(arrays(output)[0]).all()


def test_line_40_the_newer_map_wins_over_the_legacy_one(raw: Raw, start: tuple[str, Path], tiny: Path) -> None:
    from server_raw import pass_body

    inputs = inputs_of(Reference(tiny, start[1]), None)
    data = [datum(TOKENS, target_tokens=TARGETS, **inputs)]
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    model = raw.load(start[0], optimizer=False)

    def loss_of(old: dict[str, float], new: dict[str, float]) -> float:
        body = wire.ForwardBackwardRequest.FromString(pass_body(model.id, model.next(), data, "ppo", forward_only=True))
        for name, value in old.items():
            body.loss_fn_config[name] = value
        for name, value in new.items():
            body.loss_fn_config_v2[name].number = value
        request = raw.send("/forward_backward", body.SerializeToString()).json()["request_id"]
        return float(raw.result(request, "pass").metrics["loss:sum"])

    assert loss_of(wide, {}) == loss_of({}, wide) == loss_of(CLIPS, wide) != loss_of(wide, CLIPS)
    assert loss_of({}, {}) == loss_of({}, CLIPS)


@pytest.mark.parametrize("config", [{"clip_lo_threshold": 0.8}, {"clip_low_threshold": "low"}, {"beta": 1.0}])
def test_line_40_a_config_that_the_loss_does_not_know_is_refused(raw: Raw, config: dict[str, Any]) -> None:
    data = [datum([1, 2], target_tokens=[2, 3], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])]
    with pytest.raises(Failed, match=next(iter(config))) as failed:
        raw.model(lora={"rank": 2}).forward_backward(data, "ppo", config=config)
    assert failed.value.category == "user"


def recorded(raw: Raw, start: tuple[str, Path], model: RawModel) -> tuple[Any, np.ndarray[Any, Any], list[float]]:
    """Return a row that was sampled with `record_stability_info`, its sampled log-probabilities, and advantages."""
    sampler = RawSampler(raw, raw.sampler(model.session, base_model=raw.base_model()).id)
    promise = sampler.submit(TOKENS, params={"max_tokens": 5, "stop": []}, record_stability_info=True)
    (sequence,) = raw.result(promise["request_id"], "sample").sequences
    tokens, then = tokens_of(sequence), logprobs_of(sequence)
    assert len(tokens) == 5
    before = len(TOKENS) - 1
    gains = [0.0] * before + [1.0, -2.0, 0.5, 0.0, 3.0]
    row = datum(
        [*TOKENS, *tokens[:-1]], target_tokens=[*TOKENS[1:], *tokens],
        logprobs=np.concatenate([np.zeros(before, np.float32), then]), advantages=gains,
    )  # fmt: skip
    (name,) = promise["sample_sequence_ids"]
    for field, prompt, drawn in ((row.model_input_spans, 6, 4), (row.loss_fn_input_spans, 5, 5)):
        field.add().prompt_tokens.MergeFrom(
            wire.PromptProvenanceSpan(sequence_id=name, length=prompt, offset=6 - prompt)
        )
        field.add().sampled_tokens.MergeFrom(wire.SampledProvenanceSpan(sequence_id=name, length=drawn))
    return row, then, gains


@pytest.mark.parametrize("config", [{}, {"kl_coeff": 0.5, "weight_cap": 0.9}], ids=["defaults", "kl"])
def test_line_112_stable_reinforce_is_the_documented_formula_and_says_that_it_is_not_tinkers(
    raw: Raw, start: tuple[str, Path], config: dict[str, float]
) -> None:
    model = raw.load(start[0], optimizer=False)  # other weights than the base model's, which samples
    row, then, gains = recorded(raw, start, model)
    output = model.forward_backward([row], "stable_reinforce", config=config)
    now = arrays(output)[0][5:].astype(np.float64)
    weight = min(float(np.exp((now - then).sum())), config.get("weight_cap", 2.0))
    kl = np.expm1(now - then) - (now - then)
    expected = float((-weight * np.array(gains[5:]) * now + config.get("kl_coeff", 0.0) * kl).sum())
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)  # float32 sums of ten terms
    assert output.metrics["twinkle_own_formula:sum"] == 10
    assert output.metrics["weight:sum"] == pytest.approx(5 * weight, rel=1e-4)
    assert float(model.step(**ADAM)["metrics"]["grad_norm"]) > 0


def test_line_112_stable_reinforce_without_provenance_is_refused_in_words(raw: Raw) -> None:
    data = [datum([1, 2], target_tokens=[2, 3], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])]
    with pytest.raises(Failed, match=r"provenance spans are missing.*with_provenance") as failed:
        raw.model(lora={"rank": 2}).forward_backward(data, "stable_reinforce")
    assert failed.value.category == "user"


def test_line_112_a_row_that_was_not_recorded_is_refused_and_the_model_goes_on(
    raw: Raw, start: tuple[str, Path]
) -> None:
    model = raw.load(start[0], optimizer=False)
    row, _, _ = recorded(raw, start, model)
    other = raw.model(lora={"rank": 2})
    with pytest.raises(Failed, match=r"one that this session sampled with record_stability_info=True") as failed:
        other.forward_backward([row], "stable_reinforce")
    assert failed.value.category == "user"
    assert other.forward_backward([row], "importance_sampling")


def test_the_sdk_makes_tensors_of_plain_lists_for_published_inputs_alone() -> None:
    import tinker

    tokens = tinker.ModelInput.from_ints([1, 2])
    published = {"target_tokens": [2, 3], "weights": [1.0, 1.0], "logprobs": [0.0, 0.0], "advantages": [1.0, 1.0]}
    made = tinker.Datum(model_input=tokens, loss_fn_inputs=published)
    assert made.loss_fn_inputs["target_tokens"].dtype == "int64"
    with pytest.raises(KeyError, match="ref_logps"):
        tinker.Datum(model_input=tokens, loss_fn_inputs={**published, "ref_logps": [0.0, 0.0]})
    array = {**published, "ref_logps": np.zeros(2, np.float32)}
    assert tinker.Datum(model_input=tokens, loss_fn_inputs=array).loss_fn_inputs["ref_logps"].shape == [2]

"""The recipe `gkd` on tiny models: the divergence halves, runs go on wherever they are killed, teachers must fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import check_same, killed_and_continued, lines, run_recipe

from twinkle.errors import ArgumentError, ConfigError, EncodeError
from twinkle.testing import tiny_model
from twinkle_recipes.distillation.config import DistillationConfig
from twinkle_recipes.distillation.roles import asked, is_on_policy
from twinkle_recipes.run import keeper


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "student", seed=1)
    tiny_model(folder / "teacher", initializer_range=0.1)
    tiny_model(folder / "wider", vocab_size=272)
    return folder


@pytest.fixture
def values(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    if "halves" not in request.node.name:
        monkeypatch.setattr(keeper, "write_curve", lambda *_: None)  # a second each
    return {
        "model": {"id": str(models / "student"), "mixed_precision": "no"},
        "teacher": {"id": str(models / "teacher"), "mixed_precision": "no"},
        "data": {"args": {"size": 100, "language": "en", "difficulty": 1}, "eval_fraction": 0.08, "max_length": 192},
        "lora": None,
        "optimizer": {"lr": 0.01},
        "sampling": {"max_tokens": 8},
        "batch_size": 4,
        "eval_every": 10,
        "trackers": ["JsonlTracker"],
    }


@pytest.mark.full
@pytest.mark.parametrize("on_policy", [0.0, 1.0], ids=["off-policy", "on-policy"])
def test_the_divergence_from_the_teacher_halves_on_held_out_prompts(
    values: dict[str, Any], on_policy: float, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, summary = run_recipe("gkd", values, on_policy=on_policy, max_steps=20)
    steps = lines(folder)
    assert [line["step"] for line in steps] == list(range(21))
    assert {line["on_policy"] for line in steps[1:]} == {on_policy}
    assert steps[20]["eval/kl"] < 0.5 * steps[0]["eval/kl"]
    assert steps[20]["eval/reverse_kl"] < 0.5 * steps[0]["eval/reverse_kl"]
    assert summary["eval/kl"] == steps[20]["eval/kl"]
    assert f"eval/kl={steps[0]['eval/kl']:.4f}" in next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("before training: ")
    )
    for name in ("loss.png", "kl.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


TRAINING = "twinkle_transformers.model:TransformersModel.clip_grad_and_step", 4
SAMPLING = "twinkle_transformers.sampler:TorchSampler.sample", 5  # the first looks for room
SYNC = "twinkle.checkpoint_engine.manager:CheckpointEngineManager.sync_weights", 4


@pytest.mark.parametrize(
    "places",
    [
        pytest.param({"sampling": SAMPLING}, marks=pytest.mark.full),
        pytest.param({"training": TRAINING, "sync": SYNC}, marks=pytest.mark.soak),
    ],
    ids=["sampling", "training and sync"],
)
def test_a_run_goes_on_in_the_same_numbers_wherever_it_was_killed(
    values: dict[str, Any], places: dict[str, tuple[str, int]]
) -> None:
    values |= {"on_policy": 0.7, "lora": {"rank": 4, "dropout": 0.1}, "max_steps": 5, "save_every": 2}
    values["data"]["eval_fraction"] = 0
    values["sampling"]["weights"] = "own"
    config = DistillationConfig.model_validate(values)
    assert [step for step in range(1, 6) if is_on_policy(config, step)] == [1, 3, 4, 5]
    runs = killed_and_continued("gkd", values, {"whole": None, **places})
    whole = runs.pop("whole")
    assert {line["on_policy"] for line in lines(whole)} == {0, 1}
    for name, folder in runs.items():
        left = [json.loads(line)["step"] for line in Path(f"{name}.left").read_text().splitlines()]
        assert left == ([1, 2, 3] if name == "training" else [1, 2, 3, 4])
        check_same(folder, whole)


@pytest.mark.full
def test_the_student_answers_with_its_weights_as_they_are_now_shared_or_own(values: dict[str, Any]) -> None:
    values |= {"on_policy": 1, "lora": {"rank": 4}, "max_steps": 3, "optimizer": {"lr": 0.05}}
    values["data"]["eval_fraction"] = 0
    values["scheduler"] = {"warmup_steps": 0}
    shared, _ = run_recipe("gkd", values)
    for merge in (True, False):
        own, _ = run_recipe("gkd", values, sampling={"weights": "own", "merge_and_sync": merge})
        for one, other in zip(lines(shared), lines(own), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["tokens"] == other["tokens"]


@pytest.mark.full
def test_the_most_probable_tokens_alone_give_nearly_the_same(values: dict[str, Any]) -> None:
    values |= {"on_policy": 0, "max_steps": 1}
    values["data"]["eval_fraction"] = 0
    whole, _ = run_recipe("gkd", values)
    every, _ = run_recipe("gkd", values, teacher={"topk": 264})
    some, _ = run_recipe("gkd", values, teacher={"topk": 64})
    assert lines(every)[0]["kl"] == pytest.approx(lines(whole)[0]["kl"], abs=1e-5)
    assert 0 < lines(some)[0]["kl"] < lines(whole)[0]["kl"]


def test_a_teacher_with_other_tokens_is_refused_with_both_sizes(values: dict[str, Any], models: Path) -> None:
    wider = {"teacher": {"id": str(models / "wider")}, "max_steps": 1, "on_policy": 0}
    with pytest.raises(ConfigError, match=r"over 272 tokens and those of the student .* over 264.*teacher.topk"):
        run_recipe("gkd", values, **wider)
    wider["teacher"] |= {"topk": 8}  # whose padding, as it is random here, is among the most probable ones
    with pytest.raises(ArgumentError, match="hold a token outside the student's vocabulary of 264"):
        run_recipe("gkd", values, **wider)
    file = models / "wider" / "tokenizer.json"
    kept = file.read_text()
    try:
        file.write_text(kept.replace('"Q":', '"<other>":'))
        with pytest.raises(ConfigError, match=r"of 259 tokens and the trained model .* one of 259, and 2 entries"):
            run_recipe("gkd", values, **wider)
    finally:
        file.write_text(kept)


def test_prompts_without_answers_do_on_policy_and_are_refused_off_policy(values: dict[str, Any]) -> None:
    Path("prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "one?"}]}\n' * 4)
    values |= {"data": {"id": "prompts.jsonl", "eval_fraction": 0}, "max_steps": 1}
    folder, _ = run_recipe("gkd", values, on_policy=1)
    assert lines(folder)[0]["answers"] == 4
    with pytest.raises(EncodeError, match=r"row 0 has no answer, but with on_policy 0\.5"):
        run_recipe("gkd", values, on_policy=0.5)
    with pytest.raises(ValueError, match="teacher"):
        DistillationConfig.model_validate({"on_policy": 0.5})


def test_answers_without_a_token_are_left_out(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from twinkle.data_format import SampledSequence, SampleResponse
    from twinkle_transformers.sampler import TorchSampler

    sample = TorchSampler.sample

    def mostly_empty(self: Any, inputs: Any, params: Any) -> Any:
        empty = SampleResponse([SampledSequence("stop", [])])
        return [*[empty] * (len(inputs) - 1), *sample(self, inputs[-1:], params)]

    monkeypatch.setattr(TorchSampler, "sample", mostly_empty)
    values["data"]["eval_fraction"] = 0
    folder, _ = run_recipe("gkd", values, on_policy=1, max_steps=1)
    assert lines(folder)[0]["answers"] == 1
    assert lines(folder)[0]["tokens"] > 0


def test_the_prompt_is_the_conversation_without_its_last_answer() -> None:
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    assert asked(talk) == talk[:3]
    assert asked(talk[:3]) == talk[:3]

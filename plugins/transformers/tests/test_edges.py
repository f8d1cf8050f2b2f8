"""Corners of the loop in which numbers went wrong quietly once: each stays right, or is refused."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from twinkle.errors import ArgumentError, CheckpointError, DataError, NonFiniteError, OutputError, TrainingStateError
from twinkle.errors import Unsupported as NotHere
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}


def rows(lengths: tuple[int, ...] = (5, 9, 3, 7), seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [*ids[1:], -100]})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def build(folder: Path, lora: dict[str, Any] | None = LORA, **options: Any) -> TransformersModel:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(folder), mixed_precision="no", **options)
    if lora is not None:
        model.add_adapter_to_model("default", lora)
        model.set_optimizer("AdamW", lr=1e-2)
    return model


# heads, tied weights, mixtures


def test_an_adapter_on_the_head_is_scored_and_trained(folder: Path) -> None:
    model = build(folder, {"r": 4, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False})
    row = rows((6,))
    logps = model.forward_only(inputs=row)["logps"]
    log_p = model.forward_only(inputs=row, return_logits=True)["logits"].log_softmax(-1)
    wanted = log_p[0, :5].gather(-1, torch.tensor(row[0]["labels"][:5])[:, None]).squeeze(-1)
    torch.testing.assert_close(logps[0, :5], wanted)
    model.forward_backward(inputs=row)
    assert all(p.grad is not None for n, p in model.model.named_parameters() if "lm_head.lora" in n)


def test_a_head_saved_with_the_adapter_is_trained(folder: Path, tmp_path: Path) -> None:
    model = build(folder, {**LORA, "modules_to_save": ["lm_head"]})
    before = model.get_state_dict()["base_model.model.lm_head.weight"].clone()
    model.forward_backward(inputs=rows())
    model.clip_grad_and_step()
    assert not torch.equal(model.get_state_dict()["base_model.model.lm_head.weight"], before)


@pytest.mark.parametrize("option", [{"bias": "all"}, {"bias": "lora_only"}])
def test_parameters_of_the_base_that_peft_would_train_are_refused(tmp_path: Path, option: dict[str, str]) -> None:
    model = build(tiny_model(tmp_path, "qwen2"), None)
    with pytest.raises(NotHere, match=r"also trains .*bias.* leave bias at 'none'"):
        model.add_adapter_to_model("default", {**LORA, **option})
    assert sorted(model.optimizer_group) == [""]
    assert all(parameter.requires_grad for parameter in model.model.parameters())


def test_a_tied_model_refuses_a_checkpoint_that_lacks_weights(tmp_path: Path) -> None:
    model = build(tiny_model(tmp_path / "tied", tie_word_embeddings=True), None)
    saved = Path(str(model.save("full", str(tmp_path))))
    model.load(str(saved))
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, saved / "model.safetensors")
    (saved / "digests.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is absent in the files"):
        model.load(str(saved))


def test_a_router_loss_that_would_be_left_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    with pytest.raises(NotHere, match="router's auxiliary loss"):
        build(folder, None)


# rows and micro-batches


def test_columns_that_the_model_does_not_take_ride_along(folder: Path) -> None:
    model = build(folder)
    extra = [{**row, "query": "hi", "use_cache": True, "dropout": 1.0, "key": [1, 2]} for row in rows()]
    plain = model.forward_only(inputs=rows())["logps"]
    assert torch.equal(model.forward_only(inputs=extra)["logps"], plain)


def test_positions_of_the_caller_do_not_depend_on_the_neighbours(folder: Path) -> None:
    model = build(folder)
    shifted = {**rows((6,))[0], "position_ids": [3, 4, 5, 6, 7, 8]}
    alone = model.forward_only(inputs=[shifted])["logps"]
    longer = {**rows((9,))[0], "position_ids": list(range(9))}
    beside = model.forward_only(inputs=[shifted, longer])["logps"][:1, :6]
    torch.testing.assert_close(alone, beside, atol=1e-6, rtol=0)


def test_left_padded_micro_batches_join_on_the_left(folder: Path) -> None:
    model = build(folder)
    model.set_processor("InputProcessor", padding_side="left")
    whole = model.forward_only(inputs=rows())["logps"]
    cut = model.forward_only(inputs=rows(), micro_batch_size=1)["logps"]
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_forward_only_returned_fits_every_micro_batch(folder: Path, side: str) -> None:
    model = build(folder)
    model.set_processor("InputProcessor", padding_side=side)
    reference = model.forward_only(inputs=rows(), micro_batch_size=1)["logps"]
    gaps: list[float] = []

    def loss(inputs: Any, outputs: Any, ref_logps: torch.Tensor) -> Any:
        gaps.append(float((outputs["logps"].detach() - ref_logps).abs().max()))
        return {"loss": -outputs["logps"].sum(), "num_tokens": 1}

    model.set_loss(loss)
    model.forward_backward(inputs=rows(), micro_batch_size=2, ref_logps=reference)
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


def test_a_bad_row_or_a_failing_loss_leaves_no_part_of_a_gradient(folder: Path) -> None:
    model = build(folder)
    bad = rows()
    del bad[3]["labels"]
    with pytest.raises(DataError):
        model.forward_backward(inputs=bad, micro_batch_size=2)
    model.set_loss(lambda inputs, outputs: 1 / (len(inputs["labels"]) - 1))  # fails on the last, single row
    with pytest.raises(Exception, match=r"returned a float|division"):
        model.forward_backward(inputs=rows((5, 9, 3)), micro_batch_size=2)
    assert all(parameter.grad is None for parameter in model.model.parameters())
    model.set_loss("CrossEntropyLoss")
    model.forward_backward(inputs=rows())
    wanted = build(folder)
    wanted.forward_backward(inputs=rows())
    assert model.clip_grad_norm(0) == wanted.clip_grad_norm(0)


def test_an_ignore_index_of_its_own_does_not_make_padding_count(folder: Path) -> None:
    model = build(folder)
    trained = model.forward_backward(inputs=rows())["num_tokens"]
    model.zero_grad(flush=True)
    model.set_loss("CrossEntropyLoss", ignore_index=0)
    assert model.forward_backward(inputs=rows())["num_tokens"] == trained


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"temperature": 0.0}, r"temperature must be .* got 0\.0"),
        ({"temperature": -1.0}, r"temperature must be .* got -1\.0"),
        ({"micro_batch_size": "2"}, "micro_batch_size must be .* got '2'"),
        ({"micro_batch_size": 1.5}, r"micro_batch_size must be .* got 1\.5"),
    ],
)
def test_values_that_make_no_sense_are_named(folder: Path, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(folder).forward_backward(inputs=rows(), **call)


def test_inputs_that_are_no_rows_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"inputs must be .* got a NoneType"):
        build(folder).forward_backward(inputs=None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="target_modules"):
        build(folder).add_adapter_to_model("x", {"target_modulez": "all-linear"})


# adapters


def test_a_frozen_adapter_stays_frozen_and_refuses_training(folder: Path) -> None:
    model = build(folder)
    model.add_adapter_to_model("ref", LORA, is_trainable=False)
    model.forward_only(inputs=rows(), adapter_name="default")
    model.forward_only(inputs=rows(), adapter_name="ref")
    assert not any(p.requires_grad for n, p in model.model.named_parameters() if ".ref." in n)
    with pytest.raises(TrainingStateError, match="is_trainable=False"):
        model.forward_backward(inputs=rows(), adapter_name="ref")


def test_the_full_model_is_not_trained_or_saved_behind_its_adapters(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    for call in (
        lambda: model.forward_backward(inputs=rows(), adapter_name=""),
        lambda: model.set_optimizer("SGD", adapter_name=""),
        lambda: model.save("full", str(tmp_path), adapter_name=""),
    ):
        with pytest.raises(TrainingStateError, match=r"give the name of one of \['default'\]"):
            call()


def test_any_adapter_may_get_its_optimizer_at_any_time(folder: Path) -> None:
    model = build(folder)
    model.add_adapter_to_model("second", LORA)
    model.set_optimizer("SGD", adapter_name="default", lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict(adapter_name="default").items()}
    model.forward_backward(inputs=rows(), adapter_name="default")
    model.clip_grad_and_step(adapter_name="default")
    after = model.get_state_dict(adapter_name="default")
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())


def test_weights_of_an_adapter_with_another_scale_are_refused(folder: Path, tmp_path: Path) -> None:
    saved = build(folder, {**LORA, "lora_alpha": 64}).save("a", str(tmp_path))
    with pytest.raises(CheckpointError, match="trained with lora_alpha=64, this one has 8"):
        build(folder, {**LORA, "lora_alpha": 8}).load(str(saved))


# steps and numbers


def test_a_gradient_that_nobody_clipped_is_looked_at_all_the_same(folder: Path) -> None:
    model = build(folder)
    model.forward_backward(inputs=rows())
    next(p for p in model.model.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError, match="gradient norm"):
        model.step()
    assert all(torch.isfinite(p).all() for p in model.model.parameters())


def test_after_a_caught_nan_loss_nothing_of_it_is_left(folder: Path) -> None:
    model = build(folder)
    model.set_loss(lambda i, o: {"loss": o["logps"].sum() * float("nan"), "num_tokens": 1})
    model.forward(inputs=rows())
    with pytest.raises(NonFiniteError):
        model.calculate_loss()
    with pytest.raises(TrainingStateError, match="there is no forward"):
        model.backward()
    model.set_loss("CrossEntropyLoss")
    tokens = model.forward_backward(inputs=rows())["num_tokens"]
    model.clip_grad_and_step()
    assert model.calculate_metric(is_training=True)["total_tokens"] == tokens


def test_scoring_a_forward_twice_is_one_evaluation(folder: Path) -> None:
    model = build(folder)
    model.forward_only(inputs=rows())
    assert model.calculate_loss() == model.calculate_loss()
    assert model.calculate_metric(is_training=False)["total_tokens"] == 20


def test_a_weight_decay_may_be_switched_off_and_on(folder: Path) -> None:
    model = build(folder, None)
    model.set_optimizer("AdamW", lr=1e-3, weight_decay=0.0)
    for decay in (0.3, 0.0, 0.2):
        model.forward_backward(inputs=rows())
        model.step(optim_params={"weight_decay": decay})
        model.zero_grad()
        assert [g["weight_decay"] for g in model.optimizer_group[""].optimizer.param_groups] == [decay, 0.0]


def test_a_scheduler_follows_its_own_optimizer_or_is_refused(folder: Path) -> None:
    model = build(folder)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ArgumentError, match="built on another optimizer"):
        model.set_lr_scheduler(torch.optim.lr_scheduler.StepLR(other, 1))
    model.set_lr_scheduler("StepLR", step_size=1)
    model.set_optimizer("SGD", lr=0.1)
    assert model.optimizer_group["default"].lr_scheduler is None


# checkpoints


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", ["clipped", "stepped", "scheduled"])
def test_a_checkpoint_within_a_step_resumes_where_it_was(folder: Path, tmp_path: Path, moment: str) -> None:
    def finish(model: TransformersModel, call: int, begin: str | None = None) -> str | None:
        moments = ["clipped", "stepped", "scheduled", "cleared"]
        acts = [lambda: model.clip_grad_norm(0.01), model.step, model.lr_step, model.zero_grad]
        saved = None
        for name, act in zip(moments, acts, strict=True):
            if begin is not None and moments.index(name) <= moments.index(begin):
                continue
            act()
            if begin is None and call == 2 and name == moment:
                saved = model.save("c", str(tmp_path), save_optimizer=True)
        return saved

    def run(model: TransformersModel, calls: range) -> None:
        for call in calls:
            model.forward_backward(inputs=rows(seed=call))
            finish(model, call)

    def scheduled() -> TransformersModel:
        model = build(folder)
        model.set_lr_scheduler("MultiStepLR", milestones=[2, 4], gamma=0.1)
        return model

    straight = scheduled()
    run(straight, range(6))
    resumed = scheduled()
    resumed.resume_from_checkpoint(str(tmp_path / "c"))
    finish(resumed, 2, begin=moment)
    run(resumed, range(3, 6))
    ours, wanted = resumed.get_state_dict(), straight.get_state_dict()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    groups = (resumed.optimizer_group["default"], straight.optimizer_group["default"])
    assert groups[0].learning_rates() == groups[1].learning_rates()


def test_resuming_without_the_scheduler_or_with_one_too_many_is_refused(folder: Path, tmp_path: Path) -> None:
    plain = build(folder)
    without = plain.save("without", str(tmp_path), save_optimizer=True)
    plain.set_lr_scheduler("StepLR", step_size=1)
    with pytest.raises(CheckpointError, match="saved with no scheduler, the model has StepLR; set none"):
        plain.resume_from_checkpoint(str(without))
    having = plain.save("with", str(tmp_path), save_optimizer=True)
    with pytest.raises(
        CheckpointError, match=r"saved with StepLR, the model has none; call set_lr_scheduler\('StepLR'"
    ):
        build(folder).resume_from_checkpoint(str(having))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("optimizer.safetensors", b"x"),
        ("rng_state_0.safetensors", b"x"),
        ("rng_state_0.json", b"{"),
        ("rng_state_0.json", b"{}"),
        ("trainer_state.json", b"[]"),
        ("trainer_state.json", b'{"checkpoint_version": 1}'),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_weights_stay(
    folder: Path, tmp_path: Path, file: str, damage: bytes
) -> None:
    model = build(folder)
    saved = Path(str(model.save("c", str(tmp_path), save_optimizer=True)))
    model.forward_backward(inputs=rows())
    model.clip_grad_and_step()
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    (saved / file).write_bytes(damage)
    with pytest.raises(CheckpointError, match=rf"{file} was changed since it was saved"):
        model.resume_from_checkpoint(str(saved))
    (saved / "digests.json").unlink()  # as an older version saved it
    with pytest.raises(CheckpointError, match=file.split(".", maxsplit=1)[0]):
        model.resume_from_checkpoint(str(saved))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.get_state_dict().items())


def test_a_refused_resume_changes_no_weight(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    saved = model.save("c", str(tmp_path), save_optimizer=True)
    model.forward_backward(inputs=rows())
    model.clip_grad_and_step()
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    model.set_optimizer("SGD", lr=0.1)
    with pytest.raises(CheckpointError, match="AdamW"):
        model.resume_from_checkpoint(str(saved))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.get_state_dict().items())


def test_an_optimizer_over_some_parameters_resumes(folder: Path, tmp_path: Path) -> None:
    def partial() -> TransformersModel:
        model = build(folder)
        chosen = [p for n, p in model.model.named_parameters() if "lora_B" in n]
        model.set_optimizer("AdamW", lr=1e-2, params=chosen)
        return model

    model = partial()
    model.forward_backward(inputs=rows())
    model.clip_grad_and_step()
    saved = model.save("c", str(tmp_path), save_optimizer=True)
    partial().resume_from_checkpoint(str(saved))


def test_nothing_that_is_no_checkpoint_is_replaced(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="it exists and is not a checkpoint"):
        model.save("final", str(tmp_path))
    assert (tmp_path / "final" / "notes.txt").read_text() == "mine"
    for name in (".", "../up", "/absolute"):
        with pytest.raises((ArgumentError, OutputError)):
            model.save(name, str(tmp_path))
    with pytest.raises(ArgumentError, match="interval must be at least 1, got 0"):
        model.save("x", str(tmp_path), interval=0)


def test_a_peft_configuration_object_is_left_as_it_was(folder: Path) -> None:
    config = peft.LoraConfig(**LORA)
    before = config.to_dict()
    build(folder, None).add_adapter_to_model("default", config)
    assert config.to_dict() == before

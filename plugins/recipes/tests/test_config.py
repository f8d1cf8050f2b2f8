"""The configuration refuses what it does not know, and says what was probably meant."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from twinkle.errors import ConfigError
from twinkle_recipes.config import SchedulerConfig, SFTConfig, parse_slice
from twinkle_recipes.run.building import lengths_of


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"batchsize": 4}, "'batch_size'"),
        ({"optimiser": {}}, "'optimizer'"),
        ({"lora": {"rnak": 8}}, "'rank'"),
        ({"data": {"max_lenght": 8}}, "'max_length'"),
        ({"zzz": 1}, "known keys: model, data"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SFTConfig.model_validate(values)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": "many"},
        {"batch_size": 0},
        {"epochs": -1},
        {"model": {"mixed_precision": "fp4"}},
        {"model": {"gradient_checkpointing": "sometimes"}},
        {"mesh": {"tp": 2}},
        {"mesh": {"dp": 0}},
        {"optimizer": {"lr": 0}},
        {"optimizer": {"lr": float("nan")}},
        {"data": {"eval_fraction": 1.0}},
        {"data": {"slice": "a:b"}},
        {"data": {"slice": "1:9:0"}},
        {"batch_size": 4, "micro_batch_size": 8},
        {"questions": "who"},
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SFTConfig.model_validate(values)


def test_the_defaults_are_a_valid_configuration_and_survive_a_round_trip() -> None:
    config = SFTConfig()
    assert SFTConfig.model_validate(config.model_dump(mode="json")) == config
    assert SFTConfig.model_validate({"lora": None}).lora is None


def test_two_configurations_share_no_default() -> None:
    first, second = SFTConfig(), SFTConfig()
    first.model.args["x"] = 1
    first.questions.append("?")
    first.optimizer.lr = 1.0
    assert second == SFTConfig()


def test_every_key_has_a_description() -> None:
    def without(model: type[BaseModel], prefix: str = "") -> list[str]:
        missing = []
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                missing += without(kind, f"{prefix}{name}.")
            if not field.description:
                missing.append(prefix + name)
        return missing

    assert without(SFTConfig) == []


@pytest.mark.parametrize(
    ("text", "rows"),
    [(None, range(10)), (3, range(3)), ("2:5", range(2, 5)), ("::2", range(0, 10, 2)), ("-2:", range(8, 10))],
)
def test_slices_are_those_of_python(text: str | int | None, rows: range) -> None:
    assert list(range(10))[parse_slice(text)] == list(rows)


def test_warm_up_is_a_number_of_steps_or_a_part_of_them() -> None:
    config = SFTConfig.model_validate({"scheduler": {"warmup_ratio": 0.1}})
    assert config.scheduler.warmup(50) == 5
    assert SFTConfig.model_validate({"scheduler": {"warmup_steps": 0}}).scheduler.warmup(50) == 0


def test_our_own_rows_get_names_and_no_others_do() -> None:
    names = {"model_name": "Glow", "model_author": "the Twinkle founders"}
    assert SFTConfig().data.preprocessor == "SelfCognitionProcessor"
    assert SFTConfig().data.preprocessor_args == names
    mine = SFTConfig.model_validate({"data": {"preprocessor_args": {"model_name": "Mine"}}})
    assert mine.data.preprocessor_args == {**names, "model_name": "Mine"}
    assert SFTConfig.model_validate({"data": {"id": "rows.jsonl"}}).data.preprocessor is None
    assert SFTConfig.model_validate({"data": {"preprocessor": None}}).data.preprocessor is None
    other = SFTConfig.model_validate({"data": {"preprocessor": "./mine.py:Mine"}})
    assert other.data.preprocessor_args == {}


def test_the_mesh_is_that_of_the_configuration() -> None:
    assert SFTConfig().device_mesh is None
    mesh = SFTConfig.model_validate({"mesh": {"dp": 2, "fsdp": 3}}).device_mesh
    assert mesh is not None
    assert (mesh.get_dim_size("dp"), mesh.get_dim_size("fsdp"), mesh.world_size) == (2, 3, 6)


def test_a_tracker_may_be_a_mapping_that_names_its_type() -> None:
    from twinkle_recipes.run.plan import components

    given = ["JsonlTracker", {"type": "TensorBoardTracker", "flush_seconds": 0}]
    config = SFTConfig.model_validate({"trackers": given})
    assert config.model_dump(mode="json")["trackers"] == given
    names = [name for kind, name in components(config) if kind == "tracker"]
    assert names == ["JsonlTracker", "TensorBoardTracker"]
    with pytest.raises(ValueError, match="a tracker must have a `type`"):
        SFTConfig.model_validate({"trackers": [{"flush_seconds": 0}]})


def test_a_scheduler_hears_of_the_length_of_the_run_where_it_asks() -> None:
    wanted = {"num_warmup_steps": 2, "num_training_steps": 40}
    assert lengths_of(SFTConfig(scheduler=SchedulerConfig(name="LinearWarmupScheduler")), 40) == wanted
    assert lengths_of(SFTConfig(scheduler=SchedulerConfig(name="ConstantLR")), 40) == {}
    with pytest.raises(ConfigError, match="warmup_steps is 3, but ConstantLR has no warm-up"):
        lengths_of(SFTConfig(scheduler=SchedulerConfig(name="ConstantLR", warmup_steps=3)), 40)

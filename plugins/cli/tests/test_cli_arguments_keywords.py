"""`args.get_<group>_args()`: constructors take every keyword, and what they would ignore is an error."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle import DeviceMesh, initialize
from twinkle.cli import CLI, Args
from twinkle.data_format import SamplingParams
from twinkle.dataset import Dataset
from twinkle.errors import ArgumentError, ComponentNotFound, MeshError
from twinkle.template import Template
from twinkle_cli.arguments import keywords


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*argv: str) -> Args:
    return CLI.from_args(list(argv))


def refused(getter: str, *argv: str) -> str:
    args = read(*argv)
    with pytest.raises(ArgumentError) as caught:
        getattr(args, getter)()
    return str(caught.value)


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_every_argument_reaches_a_constructor_or_is_for_the_script() -> None:
    for group, names in keywords._OF_SCRIPT.items():
        assert set(names) <= {name for name in dir(getattr(Args(), group)) if not name.startswith("_")}


# Model and template


def test_the_models_keywords_are_those_of_the_class_that_the_strategy_means() -> None:
    from twinkle.model import TransformersModel

    taken = read("--model_id", "a", "--mixed_precision", "no").get_model_args()
    # trust_remote_code is one of the loader's, whose keywords the constructor passes on.
    assert set(taken) - {"trust_remote_code"} <= parameters(TransformersModel)
    assert (taken["model_id"], taken["mixed_precision"], taken["gradient_checkpointing"]) == ("a", "no", "auto")
    assert not {"load_weights", "enable_liger", "tokenizer_id"} & set(taken)


def test_megatrons_keywords_are_its_own() -> None:
    args = read("--use_megatron", "--model_id", "a", "--tokenizer_id", "t", "--recompute_num_layers", "2")
    taken = args.get_model_args()
    assert (taken["model_id"], taken["tokenizer_id"], taken["recompute_num_layers"]) == ("a", "t", 2)
    assert not {"strategy", "model_cls", "gradient_checkpointing", "fsdp_config"} & set(taken)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--no-load_weights"],
            "model.load_weights is False, but TransformersModel does not take it; set use_megatron",
        ),
        (["--recompute_num_layers", "2"], "model.recompute_num_layers is 2"),
        (["--recompute_granularity", "full"], "model.recompute_granularity is 'full'"),
        (["--use_megatron", "--fsdp_config", "{a: 1}"], "model.fsdp_config is {'a': 1}, but MegatronModel does not"),
        (["--use_megatron", "--model_cls", "A"], "model.model_cls is 'A'"),
    ],
)
def test_what_the_model_would_ignore_is_refused_even_at_its_default(flags: list[str], text: str) -> None:
    assert text in refused("get_model_args", *flags)


def test_an_argument_that_the_script_changed_is_refused_too() -> None:
    args = read()
    args.model.load_weights = False
    with pytest.raises(ArgumentError, match="load_weights"):
        args.get_model_args()


def test_model_and_template_fill_each_others_model_id() -> None:
    both = read("--model_id", "m", "--template.model_id", "t")
    assert (both.get_model_args()["model_id"], both.get_template_args()["model_id"]) == ("m", "t")
    model = read("--model_id", "m")
    assert model.get_template_args()["model_id"] == "m"
    template = read("--template.model_id", "t")
    assert template.get_model_args()["model_id"] == "t"
    tokenizer = read("--model_id", "m", "--tokenizer_id", "k")
    assert tokenizer.get_template_args()["model_id"] == "k"
    assert read().get_model_args()["model_id"] is None
    assert (model.template.model_id, template.model.model_id) == (None, None)


def test_the_templates_keywords_are_its_constructors() -> None:
    template = Template(**read("--model_id", "m", "--max_length", "64", "--no-enable_thinking").get_template_args())
    assert (template.model_id, template.max_length, template.enable_thinking) == ("m", 64, False)
    with pytest.raises(ArgumentError, match="model_id"):
        Template(**read().get_template_args())


# Adapter, data


def test_lora() -> None:
    config = pytest.importorskip("peft").LoraConfig
    assert read().get_lora_args() == {"target_modules": "all-linear", "r": 8, "lora_alpha": 32, "lora_dropout": 0.05}
    made = config(**read("--lora_r", "4", "--lora_alpha", "16", "--lora_target_modules", "[q_proj]").get_lora_args())
    assert (made.r, made.lora_alpha, made.target_modules) == (4, 16, {"q_proj"})


@pytest.mark.parametrize(
    ("text", "rows"),
    [("3", [0, 1, 2]), ("1:3", [1, 2]), (":2", [0, 1]), ("::2", [0, 2]), ("[2, 0]", [2, 0]), ("5", [0, 1, 2, 3, 0])],
)
def test_data(text: str, rows: list[int], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(4)))
    dataset = Dataset(**read("--dataset_id", "rows.jsonl", "--data_slice", text).get_dataset_args())
    assert [row["n"] for row in dataset] == rows


def test_options_of_the_hub_are_given_only_when_set() -> None:
    assert set(read().get_dataset_args()) == {"dataset_meta"}
    assert (
        read("--num_proc", "2", "--revision", "main").get_dataset_args().items()
        >= {
            "num_proc": 2,
            "revision": "main",
        }.items()
    )
    meta = read("--dataset_id", "a", "--subset_name", "b", "--split", "c").get_dataset_args()["dataset_meta"]
    assert (meta.dataset_id, meta.subset_name, meta.split, meta.data_slice) == ("a", "b", "c", None)


@pytest.mark.parametrize("text", ["a", "1:a", "1:2:0", "1:2:3:4", "0", "-3"])
def test_a_slice_that_is_none_is_refused(text: str) -> None:
    message = refused("get_dataset_args", "--data_slice", text).replace("'", "")
    assert message.startswith("dataset.data_slice must be a count")
    assert message.endswith(f"got {text}")


# Optimizer, scheduler, loss: whatever the chosen class takes

WEIGHT = torch.nn.Parameter(torch.zeros(2, 2))


def test_adam_gets_all_of_its_arguments() -> None:
    flags = ["--lr", "0.1", "--adam_beta1", "0.5", "--adam_epsilon", "1e-6", "--weight_decay", "0.2"]
    optimizer = torch.optim.AdamW([WEIGHT], **read(*flags).get_optimizer_args())
    assert {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.1,
        "betas": (0.5, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.2,
    }


@pytest.mark.parametrize("name", ["SGD", "Rprop", "Adagrad", "RMSprop", "Adafactor", "NAdam", "Adamax", "Adam"])
def test_other_optimizers_get_what_they_take(name: str) -> None:
    taken = read("--optimizer_cls", name, "--lr", "0.1").get_optimizer_args()
    assert getattr(torch.optim, name)([WEIGHT], **taken).defaults["lr"] == 0.1
    assert ("eps" in taken) == ("betas" in taken) == name.endswith(("Adam", "Adamax"))


def test_what_the_optimizer_would_ignore_is_refused() -> None:
    assert "optimizer.adam_beta1 is 0.9, but SGD does not take it; it takes params, lr" in refused(
        "get_optimizer_args", "--optimizer_cls", "SGD", "--adam_beta1", "0.9"
    )
    assert "weight_decay" in refused("get_optimizer_args", "--optimizer_cls", "Rprop", "--weight_decay", "0.1")
    with pytest.raises(ComponentNotFound, match="Adan"):
        read("--optimizer_cls", "Adan").get_optimizer_args()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"T_max": 200, "eta_min": 0.0}),
        (["--max_steps", "9"], {"T_max": 9, "eta_min": 0.0}),
        (["--num_training_steps", "9"], {"T_max": 9, "eta_min": 0.0}),
        (["--t_max", "7", "--eta_min", "0.1"], {"T_max": 7, "eta_min": 0.1}),
        (
            ["--scheduler_cls", "CosineWarmupScheduler", "--num_warmup_steps", "3"],
            {"num_warmup_steps": 3, "num_training_steps": 200},
        ),
        (["--scheduler_cls", "OneCycleLR", "--max_lr", "1", "--max_steps", "5"], {"total_steps": 5, "max_lr": 1.0}),
        (["--scheduler_cls", "ConstantLR"], {}),
        (
            ["--use_megatron", "--max_steps", "5", "--lr", "0.1", "--num_warmup_steps", "1"],
            {"lr_decay_steps": 5, "max_lr": 0.1, "lr_warmup_steps": 1},
        ),
    ],
)
def test_schedulers(flags: list[str], expected: dict[str, Any]) -> None:
    args = read(*flags)
    assert args.get_scheduler_args() == expected
    name = args.scheduler.scheduler_cls
    if not args.model.use_megatron and hasattr(torch.optim.lr_scheduler, name):
        getattr(torch.optim.lr_scheduler, name)(torch.optim.SGD([WEIGHT], lr=0.1), **expected)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--num_warmup_steps", "3"], "scheduler.num_warmup_steps is 3, but CosineAnnealingLR does not take it"),
        (["--t_max", "3", "--num_training_steps", "4"], "scheduler.num_training_steps is 4"),
        (["--lr_decay_steps", "3"], "scheduler.lr_decay_steps is 3"),
        (["--use_megatron", "--t_max", "3"], "scheduler.t_max is 3, but Megatron's scheduler does not take it"),
    ],
)
def test_what_the_scheduler_would_ignore_is_refused(flags: list[str], text: str) -> None:
    assert text in refused("get_scheduler_args", *flags)


def test_losses() -> None:
    assert read().get_loss_args() == {"ignore_index": -100}
    assert read("--ignore_index", "-1").get_loss_args() == {"ignore_index": -1}
    assert "loss.beta is 0.1, but CrossEntropyLoss does not take it" in refused("get_loss_args", "--beta", "0.1")


def test_a_loss_of_ones_own_gets_what_its_constructor_names(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from twinkle.loss import Loss\n"
        "class Mine(Loss):\n"
        "    def __init__(self, beta=1.0, epsilon=0.0): self.beta = beta\n"
        "    def __call__(self, inputs, outputs, **kwargs): raise NotImplementedError\n"
        "def plain(inputs, outputs): raise NotImplementedError\n"
    )
    assert read("--loss_cls", "./mine.py:Mine", "--beta", "0.3").get_loss_args() == {"beta": 0.3, "epsilon": 0.2}
    assert read("--loss_cls", "./mine.py:plain").get_loss_args() == {}
    assert "it takes no arguments" in refused("get_loss_args", "--loss_cls", "./mine.py:plain", "--beta", "0.3")


# Sampler, sampling, infra


def test_samplers() -> None:
    engine = read("--model_id", "m", "--max_model_len", "64").get_sampler_args()
    assert engine == {
        "model_id": "m",
        "engine_args": {"gpu_memory_utilization": 0.8, "max_model_len": 64, "enable_lora": False, "max_lora_rank": 32,
                        "enforce_eager": False},
    }  # fmt: skip
    assert read("--sampler_type", "TorchSampler", "--model_id", "m").get_sampler_args() == {"model_id": "m"}
    text = refused("get_sampler_args", "--sampler_type", "TorchSampler", "--enforce_eager")
    assert text == "sampler.enforce_eager is True, but TorchSampler does not take it; only vLLMSampler does"


def test_sampling() -> None:
    flags = ["--max_new_tokens", "5", "--temperature", "0", "--stop", "[a]", "--sampling.seed", "3"]
    params = SamplingParams(**read(*flags).get_sampling_args())
    assert params == SamplingParams(max_tokens=5, temperature=0.0, stop=["a"], seed=3)
    assert SamplingParams(**read().get_sampling_args()) == SamplingParams()


def test_infra() -> None:
    taken = read("--seed", "7", "--num_gpus", "2").get_infra_args()
    assert set(taken) <= parameters(initialize)
    assert (taken["seed"], taken["nproc_per_node"]) == (7, 2)
    assert "global_device_mesh" not in taken
    meshed = read("--dp_size", "2", "--tp_size", "2", "--sequence_parallel")
    assert meshed.get_mesh_args() == {"dp_size": 2, "tp_size": 2, "sequence_parallel": True}
    assert meshed.get_infra_args()["global_device_mesh"] == DeviceMesh.from_sizes(**meshed.get_mesh_args())
    assert "global_device_mesh" not in read("--mode", "ray", "--dp_size", "2").get_infra_args()
    with pytest.raises(MeshError):
        read("--world_size", "3", "--dp_size", "2").get_infra_args()


def test_every_size_is_one_of_the_meshs() -> None:
    sizes = {name for name in Args.__dataclass_fields__["infra"].default_factory.__dataclass_fields__  # type: ignore[union-attr]
             if name.endswith("_size")}  # fmt: skip
    assert sizes == {name for name in parameters(DeviceMesh.from_sizes) if name.endswith("_size")}


@pytest.mark.parametrize("group", ["training", "rl", "checkpoint", "server"])
def test_groups_that_are_the_scripts_own_come_whole(group: str) -> None:
    args = read()
    assert getattr(args, f"get_{group}_args")() == args.to_dict()[group]
